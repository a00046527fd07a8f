// What kernels take, and the table of kernels that every level fills. Compiled for any machine.
#pragma once
#include <cstdint>

// Levels share these functions: one that is not inlined could carry instructions of a level to machines without them.
#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace archerfish {

constexpr int kGroup = 16;        // outputs whose weights lie side by side
constexpr int kBlock = 32;        // inputs that share a scale, in weights and activations
constexpr int kSuper = 8;         // blocks of a super-block, in the K formats
constexpr int kFewRows = 4;       // up to which each thread prepares all rows of a product for itself
constexpr int kRowsAtOnce = 128;  // of a product whose sums a thread holds
constexpr int64_t kLine = 64;     // bytes of a cache line

constexpr int kQueries = 64;  // rows of a tile of attention
constexpr int kMostHeadDim = 1024;
constexpr int kChunk = 64;  // keys that a tile takes at a time

enum class Type : int { kFloat, kHalf, kBfloat, kByte };  // kByte: int8, of keys and values alone
enum class Activation : int { kNone, kGelu, kGeluTanh, kRelu, kReluSquared, kSigmoid, kSilu, kTanh, kSwigluOai };
enum class Format : int {
  kFloat,
  kHalf,
  kBfloat,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kInt8,
  kMxfp4
};
enum class Pooling : int { kMean, kFirst, kLast, kMax, kSqrt };

// A matrix of (outputs, inputs), packed by `pack_rows`: groups of 16 outputs, one after the other.
struct Matrix {
  Format format;
  int64_t num_outputs, num_inputs;
  const uint8_t* data;
  const float* bias;  // or null
};

struct alignas(64) Counter {
  int64_t value;
};

// Where threads wait for one another: they spin for a while, then sleep.
struct Barrier {
  alignas(64) int num_waiting = 0;
  int num_asleep = 0;
  alignas(64) int generation = 0;
  void wait(int num_threads);
};

// One thread's part in an operation that all threads of a pass run together.
struct Task {
  int thread, num_threads;
  Counter* counters;  // two, both 0 when the operation begins
  Barrier* barrier;
  char* shared;  // memory for all threads, as large as the operation has asked for
  char* own;     // memory of this thread, as large as the operation has asked for

  ALWAYS_INLINE void wait() const {
    if (num_threads > 1) barrier->wait(num_threads);
  }
  // Calls work(first, last) for pieces of `size` items until all `count` are taken by some thread.
  template <class F>
  ALWAYS_INLINE void share(int phase, int64_t count, int64_t size, F work) const {
    if (num_threads == 1) {
      if (count) work(int64_t(0), count);
      return;
    }
    for (;;) {
      int64_t first = __atomic_fetch_add(&counters[phase].value, size, __ATOMIC_RELAXED);
      if (first >= count) return;
      work(first, first + size < count ? first + size : count);
    }
  }
};

// softcap(activation(x @ matrix.T + bias) + residual), each where it is wanted. With a norm, x is normalised first.
struct Linear {
  const Matrix* matrix;
  const float* x;
  int64_t num_rows;
  const float* norm = nullptr;    // factors of the RMS norm of x + before
  const float* before = nullptr;  // what is added to x in front of the norm
  float* total = nullptr;         // x + before, if wanted
  float eps = 0;
  Activation activation = Activation::kNone;
  bool is_deterministic = false;  // what a row gives must not depend on how many there are
  bool is_gated = false;          // activation(first half of the outputs) * second half
  const float* residual = nullptr;
  float softcap = 0;
  float* out;
  int64_t out_width;  // numbers of a row of out and of residual
};

// How rows choose experts, and the weights of these.
struct Route {
  const float* logits;
  int64_t num_rows, num_logits, num_experts, num_chosen;  // num_logits: numbers of a row, one for each expert first
  bool is_sigmoid, is_normed;  // scores by logistic functions instead of a softmax; weights of a row add up to `scale`
  float scale;
  const float* bias;  // added to scores that are compared; or null
  int32_t* ids;       // (rows, chosen)
  float* weights;     // (rows, chosen)
  int32_t* order;     // the places of `ids`, by expert
};

// What adapters add to a product's results: softcap(activation(y + scale * B (A x))), by the slot of each row.
constexpr int kMostParts = 4;
struct Lora {
  float* y;
  const float* x;
  int64_t num_rows, num_inputs, num_outputs;
  const int64_t* ids =
      nullptr;           // of a lookup: what is looked up in `down`, (slots, inputs, most rank); x means nothing
  const int64_t* slots;  // of each row, or of each row of the pass, from 1; 0: none
  const int64_t* kept = nullptr;  // the row of the pass that each row is; null: the same one
  const float* down;              // (slots, parts * most rank, inputs)
  const float* up;                // (slots, most rank, outputs)
  const int64_t* ranks;           // of the slots
  int64_t max_rank, num_parts, sizes[kMostParts];
  float* inner;  // A x: (rows, parts * most rank), for experts in the order of `Route::order`
  Activation activation = Activation::kNone;
  float softcap = 0, scale = 1;
};

// Products of rows with a matrix of each expert that they chose. Without weights: the gated first product, whose rows
// lie in the order of `order`. With weights: the second one of such rows, added up for each row.
struct Experts {
  const Matrix* matrix;  // those of all experts, one below the other
  int64_t num_experts, num_rows, num_chosen, num_logits;
  const float* x;
  const int32_t *ids, *order;
  const float* weights = nullptr;
  const float* logits =
      nullptr;  // the number behind those of experts, if there is one, says how much of `shared` is added
  const float* shared = nullptr;  // rows to be added; or null
  Activation activation = Activation::kNone;
  bool is_deterministic = false;
  const Lora* lora = nullptr;  // what adapters add to each product: each slot has a place for every expert; or null
  float* out;
};

struct Norm {
  const float* x;
  const float* before;  // added first; or null
  float* total;         // the sum, if wanted
  const float* weight;  // null: out is the sum
  const float* bias;    // of a layer norm; null: an RMS norm
  float eps;
  int64_t num_rows, width;
  float* out;
};

struct Tables {  // the sum of rows of up to three tables
  int num_tables;
  const void* memory[3];
  Type types[3];
  const Matrix* packed;  // in place of the first table; or null
  const int64_t* ids[3];
  int64_t offsets[3];  // added to ids
  float scale;
  int64_t num_rows, width;
  float* out;
};

// Numbers from one KV head to the next. One of int8 has its scale behind it, a float32.
ALWAYS_INLINE int64_t head_stride(Type type, int head_dim) { return type == Type::kByte ? head_dim + 4 : head_dim; }

struct KVStore {
  const float* qkv;
  int64_t num_rows;
  int num_heads, num_kv_heads, head_dim, rotary_dim;  // rotary_dim: 0: none
  const float* cos_sin;                               // (positions, rotary_dim)
  const float* q_norm;
  const float* k_norm;
  bool is_q_norm_whole, is_k_norm_whole;  // all heads are normalised together
  bool is_interleaved;                    // neighbours are rotated together, not halves
  float eps;
  const int64_t* positions;
  const int64_t* slots;
  Type type;
  void* keys;  // null: nothing is stored, and queries and keys are turned where they lie: q is qkv then
  void* values;
  float* q;
};

// Attention of packed sequences over blocks of keys and values, or within each where there are no blocks.
struct Attend {
  const float* q;  // rows of `q_stride` numbers
  int64_t q_stride, num_sequences;
  const int64_t* starts;        // (sequences + 1) where each sequence's rows begin
  const int64_t* context_lens;  // null: as many keys as rows
  const int64_t* block_tables;
  int64_t table_width, block_size;
  const void* keys;
  const void* values;
  int64_t key_stride;  // numbers from one key to the next
  Type type;
  bool is_exact;   // no products in 16 bits
  bool is_causal;  // a row sees no keys behind its own; a window reaches to both sides otherwise
  int num_heads, num_kv_heads, head_dim, window;
  float scale, softcap;
  const float* bias;  // (heads, bias_size, bias_size), or null
  int64_t bias_size;
  const float* sinks;  // of each head, a score without a value; or null
  float* out;
};

struct Pool {
  const float* x;
  const int64_t* starts;
  int64_t num_sequences, width;
  Pooling mode;
  float* out;
};

// Token shift. A slot's input lies `input_stride` numbers behind that of the slot before it.
constexpr int kMostFactors = 6;
struct Shift {
  const float* x;
  int64_t num_rows, width, num_pieces;
  const int64_t *previous, *targets, *starts;
  float* inputs;
  int64_t input_stride;
  const float* factors;
  int num_factors;
  float* out[kMostFactors];
};

// The time mix of RWKV-7 between its products.
struct MixHeads {
  const float *receptance, *decay, *key, *value, *rate, *gate, *first_value, *value_mix;  // the last two: or null
  const float *removal, *replacement, *bonus, *norm, *norm_bias;
  float eps;
  int64_t num_rows, num_heads, head_dim, num_sequences, num_pieces;
  const int64_t *sources, *targets, *starts, *first_pieces;
  float* states;  // of a slot: (heads, keys, values)
  int64_t state_stride;
  float* out;
};

struct Change {  // of a logit: a number to add, or -inf: the token is ruled out
  int64_t token;
  float value;
};

// How to choose one token of a row of logits; the meaning is that of archerfish/kernels/sampling.py.
struct SampleRow {
  const float* logits;
  int64_t first = 0, end = 0, offset = 0;  // of the range
  float temperature = 0, min_p = 0;        // temperature 0: the likeliest token
  int64_t top_k = INT64_MAX;
  double top_p = 1, number = 0;   // number: in [0, 1), says which token is drawn
  const int64_t* bits = nullptr;  // of tokens that are allowed
  const Change* changes = nullptr;
  int64_t num_changes = 0;
  const int64_t* counted = nullptr;  // ids of tokens with penalties, some more than once
  int64_t num_counted = 0;
  const int32_t* counts = nullptr;  // of all tokens: twice the number in the output, and 1 more for one of the prompt
  float repetition = 1, presence = 0, frequency = 0;
};
enum Outcome : int64_t { kChosen, kNotFinite, kNoneLeft };

struct ScoreRow {  // log-probabilities of a token and of the likeliest ones
  const float* logits;
  int64_t size, token, num_top;
  double* logprob;
  int64_t* rank;
  int64_t* top_ids;
  double* top_logprobs;
};

struct Kernels {
  const char* name;
  void (*linear)(const Linear&, const Task&);
  void (*route)(const Route&, const Task&);
  void (*experts)(const Experts&, const Task&);
  void (*norm)(const Norm&, const Task&);
  void (*tables)(const Tables&, const Task&);
  void (*gated)(const float* x, int64_t num_rows, int64_t width, Activation, float* out, const Task&);
  void (*store_kv)(const KVStore&, const Task&);
  void (*attend)(const Attend&, const Task&);
  void (*pool)(const Pool&, const Task&);
  void (*normalize)(const float* x, int64_t num_rows, int64_t width, float* out, const Task&);
  void (*unpack)(const Matrix&, float* out);  // (outputs, inputs) as float32
  void (*shift)(const Shift&, const Task&);
  void (*mix_heads)(const MixHeads&, const Task&);
  void (*sample)(const SampleRow*, int64_t num_rows, int64_t* tokens, int64_t* outcomes, const Task&);
  void (*score)(const ScoreRow*, int64_t num_rows, const Task&);
  void (*lora)(const Lora&, const Task&);
};

// Memory that operations need, in bytes, for all threads and for each.
ALWAYS_INLINE int64_t linear_shared_bytes(const Matrix& matrix, int64_t num_rows) {
  return (num_rows + 15) / 16 * 16 * (matrix.num_inputs + kBlock) * 4 + 4 * kLine;  // as float32; other forms take less
}
ALWAYS_INLINE int64_t linear_panel_bytes(const Matrix& matrix) { return (matrix.num_inputs + kBlock) * kGroup * 4; }
ALWAYS_INLINE int64_t linear_own_bytes(const Matrix& matrix) {
  return 2 * kRowsAtOnce * kGroup * 4 + 2 * linear_panel_bytes(matrix) + 2 * linear_shared_bytes(matrix, kFewRows);
}
ALWAYS_INLINE int64_t expert_run_bytes(int64_t num_experts) { return (num_experts + 2) * kLine; }
ALWAYS_INLINE int64_t experts_own_bytes(const Matrix& matrix, int64_t num_experts) {
  return expert_run_bytes(num_experts) + 2 * kRowsAtOnce * kGroup * 4 + 2 * linear_panel_bytes(matrix);
}
ALWAYS_INLINE int64_t experts_shared_bytes(const Matrix& matrix, int64_t num_places, int64_t num_experts) {
  return linear_shared_bytes(matrix, num_places + 8 * (num_places < num_experts ? num_places : num_experts));
}
ALWAYS_INLINE int64_t
attend_own_bytes(const Attend& args) {  // queries, their sums, scores, weights, and a chunk's keys and values
  const int64_t dim = args.head_dim + kBlock;
  return 8 * kQueries * dim + 6 * kQueries * kChunk + 8 * kChunk * dim + 12 * kQueries + 16 * kLine;
}
ALWAYS_INLINE int64_t mix_row(int64_t head_dim) { return (head_dim + kGroup - 1) / kGroup * kGroup; }
ALWAYS_INLINE int64_t mix_own_bytes(int64_t head_dim) { return 8 * 4 * mix_row(head_dim); }
ALWAYS_INLINE int64_t sample_room(int64_t row_size) {  // numbers
  return (row_size + 511) / 512 * 512 + 512;
}
ALWAYS_INLINE int64_t sample_own_bytes(int64_t row_size) { return sample_room(row_size) * 26 + (1 << 16); }

}  // namespace archerfish
