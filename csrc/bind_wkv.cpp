// Operations of RWKV-7 on tapes.
#include "module.h"

namespace archerfish {
namespace {

// Memory of a layer in all slots, which lie apart.
using Inputs = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using States = nb::ndarray<float, nb::ndim<4>, nb::device::cpu>;

// The arrays of a step that say where pieces of sequences begin, and the slots of these.
void limit_pieces(Tape& tape, int64_t num_slots) {
  tape.limit(Input::kPieceStarts, 1, INT64_MAX);
  tape.limit(Input::kTargets, 0, num_slots);
}

void add_shift(Tape& tape, int x, const Inputs& inputs, const Floats& factors, std::vector<int> outs) {
  Shift args{};
  const int64_t num_slots = int64_t(inputs.shape(0));
  args.width = checked_size(int64_t(inputs.shape(1)), "The inputs of a shift have too few or too many numbers.");
  args.num_factors = int(outs.size());
  check(!outs.empty() && outs.size() <= size_t(kMostFactors) && inputs.stride(1) == 1,
        "The factors of a shift do not fit its inputs.");
  args.factors = floats_of(factors, args.num_factors * args.width, "The factors of a shift do not fit its inputs.");
  args.inputs = start_of<float>(inputs), args.input_stride = inputs.stride(0);
  limit_pieces(tape, num_slots);
  tape.limit(Input::kPrevious, -num_slots, INT64_MAX);
  std::vector<Use> uses = {reads(x, Rows::kTokens, args.width)};
  for (int out : outs) uses.push_back(writes(out, Rows::kTokens, args.width));
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
void add_mix_heads(Tape& tape, std::vector<int> inputs, const std::vector<Floats>& weights, float eps,
                   const States& states, int out) {
  MixHeads args{};
  const int64_t num_slots = int64_t(states.shape(0)), num_heads = int64_t(states.shape(1)),
                dim = int64_t(states.shape(2)), width = num_heads * dim;
  check(num_heads > 0 && dim > 0 && dim <= kMostHeadDim && num_heads <= kMostSize / dim,
        "States have too few or too many heads or dimensions.");
  check(int64_t(states.shape(3)) == dim && states.stride(3) == 1 && states.stride(2) == dim &&
            (num_heads == 1 || states.stride(1) == dim * dim),
        "The states of a mix do not fit its kernel: a head is one piece of memory.");
  check(inputs.size() == 6 || inputs.size() == 8, "A mix has six or eight inputs.");
  check(weights.size() == 5, "A mix has five weights.");
  const float** vectors[] = {&args.removal, &args.replacement, &args.bonus, &args.norm, &args.norm_bias};
  for (size_t i = 0; i < weights.size(); i++)
    *vectors[i] = floats_of(weights[i], width, "The weights of a mix do not fit its states.");
  args.num_heads = num_heads, args.head_dim = dim, args.eps = eps;
  args.states = start_of<float>(states), args.state_stride = states.stride(0);
  limit_pieces(tape, num_slots);
  tape.limit(Input::kSources, 0, num_slots), tape.limit(Input::kFirstPieces, 0, INT64_MAX);
  std::vector<Use> uses = {writes(out, Rows::kTokens, width)};
  for (int input : inputs) uses.push_back(reads(input, Rows::kTokens, width));
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
