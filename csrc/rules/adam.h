// Adam, AdamW and NAdam with torch.optim's arithmetic: the step, which also writes predictions, and
// predictions alone. The three differ only in their coefficients.
//
//   d  = sign*factor*g + weight_decay*W
//   m' = decay*m + (1 - decay)*d,  u' = decay2*u + ((1 - decay2)*d)*d
//   W' = keep*W - (momentum*m' + gradient*d) / (sqrt(u')*root + eps)
//
// Predictions read the moments as stored. A bfloat16 second moment whose decay is above
// kRoundedDecay is rounded stochastically: rounded to nearest, it would not move.
#pragma once

#include "stream.h"
#include "terms.h"

namespace spectrain {

// The change of the weights without decoupled decay.
template <class Acc>
SPECTRAIN_HD Acc adam_way(const Coefficients<Acc>& c, Acc eps, Acc m, Acc root_u, Acc d) {
  const Acc direction =
      c.gradient == Acc(0) ? c.momentum * m : multiply_add(c.momentum, m, c.gradient * d);
  return direction / multiply_add(root_u, c.root, eps);
}

// A predicted step. It keeps W if nothing changes, because 0*inf and 0/0 would be NaN. Sharing one
// division between terms with the same denominator was no faster on a CPU (1.01 to 1.20 of the
// time, in cache).
template <class Acc>
SPECTRAIN_HD Acc adam_move(const Coefficients<Acc>& c, Acc eps, Acc w, Acc m, Acc root_u, Acc d) {
  const bool still = c.momentum == Acc(0) && c.gradient == Acc(0);
  const Acc kept = c.keep == Acc(1) ? w : c.keep * w;
  return still ? kept : kept - adam_way(c, eps, m, root_u, d);
}

template <class Acc>
struct AdamMove {
  Coefficients<Acc> by;
  Acc eps;
};

template <class W, class G, class M, class Out>
struct AdamStep : Defaults {
  using Acc = acc_t<W>;
  static constexpr bool reads_memory = true;
  using Streams = StreamList<InOut<Role::params, W>, In<Role::grads, G>, InOut<Role::momentum, M>,
                             InOut<Role::second, M>>;
  struct Step {
    Direction<Acc> direction;
    Acc decay, gain, decay2, gain2, eps;
    Coefficients<Acc> move;
  };
  struct Args {
    Step step;
    Rounding second;  // of bfloat16 second moments
    Predictions<Acc> predictions;
  };
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    // The step's number is a seed of its own; ~ keeps it apart from the users' seeds for weights.
    a.second = s.rounds_second() ? Rounding::seeded(~static_cast<uint64_t>(s.count)) : Rounding{};
    a.step = {Direction<Acc>::make(s),          static_cast<Acc>(s.decay),
              static_cast<Acc>(s.gain),         static_cast<Acc>(s.decay2),
              static_cast<Acc>(1.0 - s.decay2), static_cast<Acc>(s.eps),
              Coefficients<Acc>::make(s.step)};
    Predictions<Acc>::make(s, a.predictions);
  }
  SPECTRAIN_HD static Step step(const Args& a, unsigned /*flags*/, Acc factor) {
    Step step = a.step;
    step.direction = step.direction.scaled(factor);
    return step;
  }
  SPECTRAIN_HD static void apply(const Step& a, Acc (&x)[4]) {
    const Acc d = a.direction(x[Streams::grads], x[Streams::params]);
    x[Streams::momentum] = multiply_add(a.decay, x[Streams::momentum], a.gain * d);
    // torch's order: u stays finite for a float32 gradient of 1e20, whose square overflows.
    x[Streams::second] = multiply_add(a.decay2, x[Streams::second], a.gain2 * d * d);
    const Acc way =
        adam_way(a.move, a.eps, x[Streams::momentum], square_root(x[Streams::second]), d);
    x[Streams::params] =
        (a.move.keep == Acc(1) ? x[Streams::params] : a.move.keep * x[Streams::params]) - way;
    x[Streams::grads] = d;
  }

  static constexpr bool has_outs = true;
  static constexpr bool divides = true;
  static constexpr unsigned kKept =
      1u << Streams::grads | 1u << Streams::second;  // the direction and the root
  using OutType = Out;
  using Move = AdamMove<Acc>;
  SPECTRAIN_HD static Move move(const Args& a, int term) {
    return {a.predictions.term[term], a.step.eps};
  }
  SPECTRAIN_HD static void known(Acc (&x)[4]) {
    x[Streams::second] = square_root(x[Streams::second]);
  }
  SPECTRAIN_HD static Acc advance(const Move& m, Acc w, const Acc (&x)[4]) {
    return adam_move(m.by, m.eps, w, x[Streams::momentum], x[Streams::second], x[Streams::grads]);
  }
};

// Predictions alone; the output may be W itself. They cannot use the direction, which is unknown.
template <class W, class M, class Out>
struct AdamPredict : Defaults {
  using Acc = acc_t<W>;
  static constexpr bool reads_memory = true;
  using Streams = StreamList<In<Role::params, W>, In<Role::momentum, M>, In<Role::second, M>>;
  struct Args {
    Acc eps;
    Predictions<Acc> predictions;
  };
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    a.eps = static_cast<Acc>(s.eps);
    Predictions<Acc>::make(s, a.predictions);
  }
  struct Step {};
  SPECTRAIN_HD static Step step(const Args&, unsigned /*flags*/, Acc) { return {}; }
  SPECTRAIN_HD static void apply(const Step&, Acc (&)[3]) {}

  static constexpr bool has_outs = true;
  static constexpr bool divides = true;
  static constexpr unsigned kKept = 1u << Streams::second;
  using OutType = Out;
  using Move = AdamMove<Acc>;
  SPECTRAIN_HD static Move move(const Args& a, int term) {
    return {a.predictions.term[term], a.eps};
  }
  SPECTRAIN_HD static void known(Acc (&x)[3]) {
    x[Streams::second] = square_root(x[Streams::second]);
  }
  SPECTRAIN_HD static Acc advance(const Move& m, Acc w, const Acc (&x)[3]) {
    return adam_move(m.by, m.eps, w, x[Streams::momentum], x[Streams::second], Acc(0));
  }
};

}  // namespace spectrain
