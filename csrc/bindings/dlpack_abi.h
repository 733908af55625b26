// The part of the DLPack 1.x C ABI that borrowing needs: https://dmlc.github.io/dlpack/latest/.
// Declared here, so that building needs no header of any framework.
#pragma once

#include <cstdint>

namespace spectrain::dlpack {

constexpr uint32_t kMajorVersion = 1;

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct Device {
  DeviceType type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; before DLPack 1.2 null if contiguous
  uint64_t byte_offset;
};

struct Version {
  uint32_t major, minor;
};

// The result of `__dlpack__`, in capsules named "dltensor" or, with a version,
// "dltensor_versioned". The consumer renames the capsule to "used_..." and calls the deleter once.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);  // may be null
};

constexpr uint64_t kReadOnly = 1;

struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);  // may be null
  uint64_t flags;
  Tensor tensor;
};

// `type(array).__dlpack_c_exchange_api__` is a capsule that points to this. Only entries used here
// are typed.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*borrow)(void* object, Tensor* out);  // -1 with a Python exception set
  int (*current_stream)(DeviceType, int32_t id, void** out);
};

}  // namespace spectrain::dlpack
