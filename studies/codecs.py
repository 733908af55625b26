"""Codecs by name."""
import torch
class BF:
    def pack(self, t, backward): return t.bfloat16()
    def unpack(self, p, like, backward): return p.to(like.dtype)
def codec_of(name):
    if name is None: return None
    if name == "bf16": return BF()
    from spectrain_ext import codecs
    return {"int8": codecs.Int8(), "int4": codecs.Int4(hadamard=True)}[name]
