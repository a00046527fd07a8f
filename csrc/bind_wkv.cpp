// Operations of RWKV-7 on tapes.
#include "module.h"

namespace archerfish {
namespace {

// Memory of a layer in all slots, which lie apart.
using States = nb::ndarray<float, nb::device::cpu>;

void add_shift(Tape& tape, int x, States inputs, Array factors, std::vector<int> outs) {
  Shift args{};
  args.width = int64_t(inputs.shape(1)), args.num_factors = int(outs.size());
  if (outs.size() > size_t(kMostFactors) || int64_t(factors.size()) != args.num_factors * args.width ||
      inputs.stride(1) != 1)
    throw nb::value_error("The factors of a shift do not fit its inputs.");
  args.inputs = inputs.data(), args.input_stride = inputs.stride(0), args.factors = floats(factors);
  std::vector<int> uses = outs;
  uses.push_back(x);
  tape.add(uses, [=](const Frame& frame, const Task& task) {
    Shift mine = args;
    mine.x = frame.at(x), mine.num_rows = frame.sizes.of(Rows::kTokens), mine.num_pieces = frame.sizes.num_pieces;
    mine.previous = frame.input(Input::kPrevious), mine.targets = frame.input(Input::kTargets);
    mine.starts = frame.input(Input::kPieceStarts);
    for (size_t f = 0; f < outs.size(); f++) mine.out[f] = frame.at(outs[f]);
    frame.kernels->shift(mine, task);
  });
}

// inputs: receptance, decay, key, value, rate, gate, first value, value mix.
// weights: removal, replacement, bonus, norm and its bias.
void add_mix_heads(Tape& tape, std::vector<int> inputs, std::vector<Array> weights, float eps, States states, int out) {
  MixHeads args{};
  args.num_heads = int64_t(states.shape(1)), args.head_dim = int64_t(states.shape(2)), args.eps = eps;
  const int64_t dim = args.head_dim;
  bool fits = states.stride(3) == 1 && states.stride(2) == dim && states.stride(1) == dim * dim;
  for (const Array& each : weights) fits = fits && int64_t(each.size()) == args.num_heads * dim;
  if (!fits) throw nb::value_error("The weights of a mix do not fit its states.");
  args.states = states.data(), args.state_stride = states.stride(0);
  args.removal = floats(weights[0]), args.replacement = floats(weights[1]), args.bonus = floats(weights[2]);
  args.norm = floats(weights[3]), args.norm_bias = floats(weights[4]);
  std::vector<int> uses = inputs;
  uses.push_back(out);
  tape.add(
      uses,
      [=](const Frame& frame, const Task& task) {
        MixHeads mine = args;
        const float** rows[] = {&mine.receptance, &mine.decay, &mine.key,         &mine.value,
                                &mine.rate,       &mine.gate,  &mine.first_value, &mine.value_mix};
        for (size_t i = 0; i < inputs.size(); i++) *rows[i] = frame.at(inputs[i]);
        mine.num_rows = frame.sizes.of(Rows::kTokens), mine.num_sequences = frame.sizes.of(Rows::kSequences);
        mine.num_pieces = frame.sizes.num_pieces, mine.sources = frame.input(Input::kSources);
        mine.targets = frame.input(Input::kTargets), mine.starts = frame.input(Input::kPieceStarts);
        mine.first_pieces = frame.input(Input::kFirstPieces), mine.out = frame.at(out);
        frame.kernels->mix_heads(mine, task);
      },
      nullptr, mix_own_bytes(dim));
}

}  // namespace

void bind_wkv(nb::module_& m) {
  m.def("shift", &add_shift, "tape"_a, "x"_a, "inputs"_a.noconvert(), "factors"_a.noconvert(), "outs"_a,
        nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  m.def("mix_heads", &add_mix_heads, "tape"_a, "inputs"_a, "weights"_a.noconvert(), "eps"_a, "states"_a.noconvert(),
        "out"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>());
}

}  // namespace archerfish
