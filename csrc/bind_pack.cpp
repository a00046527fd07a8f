// Matrices for Python, and packing: many matrices at once, by all threads, into one piece of memory.
#include <sys/mman.h>

#include <algorithm>

#include "module.h"

namespace archerfish {
namespace {

constexpr int64_t kPieceRows = 4 * kGroup;

// Pages come when they are written, so by all threads. Huge ones were no gain for products, and took up to 0.1 s more
// to be found.
std::shared_ptr<uint8_t> zeros(size_t num_bytes) {
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<uint8_t*>(memory), [=](uint8_t*) { munmap(memory, num_bytes); }};
}

// The memory of matrices, allocated when this is made; `run` fills it.
class Packing {
 public:
  explicit Packing(const std::vector<OwnedMatrix*>& matrices) {
    int64_t total = kLine;
    for (auto each = matrices.begin(); each != matrices.end(); each++) {
      check(*each && !(*each)->data && std::find(matrices.begin(), each, *each) == each, "A matrix is packed once.");
      total += room_of(**each);
      check(total <= kMostBytes, "No memory holds these matrices.");
    }
    memory_ = zeros(size_t(total));
    uint8_t* at = memory_.get();
    for (OwnedMatrix* matrix : matrices) {
      matrix->memory = memory_, matrix->data = at;
      for (auto& part : matrix->parts) {
        for (int64_t row = 0; row < part.rows.count; row += kPieceRows)
          pieces_.push_back(
              {matrix->format, matrix->num_inputs, part.rows, row, std::min(row + kPieceRows, part.rows.count), at});
        parts_.push_back(std::move(part));
      }
      matrix->parts.clear();
      at += room_of(*matrix);
    }
  }

  void run(Threads& threads, int num_threads) {
    Released released;
    size_t next = 0;
    threads.run(num_threads, [&](int) {
      for (;;) {
        const size_t mine = __atomic_fetch_add(&next, size_t(1), __ATOMIC_RELAXED);
        if (mine >= pieces_.size()) return;
        const Piece& piece = pieces_[mine];
        pack_rows(piece.format, piece.num_inputs, piece.rows, piece.begin, piece.end, piece.out);
      }
    });
  }

 private:
  struct Piece {
    Format format;
    int64_t num_inputs;
    SourceRows rows;
    int64_t begin, end;
    uint8_t* out;
  };
  static int64_t room_of(const OwnedMatrix& matrix) { return (matrix.num_bytes + 2 * kLine - 1) / kLine * kLine; }

  std::shared_ptr<uint8_t> memory_;
  std::vector<Piece> pieces_;
  std::vector<OwnedMatrix::Part> parts_;
};

// The float16 of an array, one for each block; null if the format has none.
const uint16_t* halves_of(const std::optional<Array>& array, bool is_needed, int64_t num_blocks) {
  if (!is_needed) return nullptr;
  check(array && array->itemsize() == 2 && int64_t(array->size()) == num_blocks,
        "Each block has its numbers of 16 bits.");
  return start_of<const uint16_t>(*array);
}

void add_rows(OwnedMatrix& self, Array rows, int64_t first, int64_t count, int type, std::optional<Array> scales,
              std::optional<Array> mins) {
  check(!self.data, "A matrix that is packed takes no more rows.");
  check(first >= 0 && count >= 0 && count <= self.num_outputs && first <= self.num_outputs - count,
        "The rows are not among the outputs of the matrix.");
  const Type stored = checked_enum(type, Type::kBfloat, "There is no such type of numbers.");
  const bool has_numbers = is_plain(self.format) || self.format == Format::kInt8;
  const bool has_halves = !has_numbers && !is_super(self.format);
  const int64_t row_bytes = source_row_bytes(self.format, stored, self.num_inputs);
  const int64_t num_blocks = count * (self.num_inputs / kBlock);
  check(int64_t(rows.nbytes()) == count * row_bytes, "The rows of a matrix have other bytes than its format.");
  check(!has_numbers || reinterpret_cast<uintptr_t>(rows.data()) % uintptr_t(item_bytes(stored)) == 0,
        "An array is not aligned.");
  self.parts.push_back({{stored, rows.data(), halves_of(scales, has_halves, num_blocks),
                         halves_of(mins, has_halves && has_min(self.format), num_blocks), first, count},
                        {rows, scales, mins}});
}

void set_bias(OwnedMatrix& self, const Vector& bias) {
  const float* numbers = floats_of(bias, self.num_outputs, "A bias has a number for each output.");
  self.bias_memory.assign(size_t(self.num_outputs + kGroup), 0.0f);
  std::copy(numbers, numbers + self.num_outputs, self.bias_memory.begin());
  self.bias = self.bias_memory.data();
}

void unpack(const OwnedMatrix& self, const nb::ndarray<float, nb::c_contig, nb::device::cpu>& out, const Level& level) {
  check(self.data, "A matrix is not packed.");
  check(int64_t(out.size()) == self.num_outputs * self.num_inputs, "The array has another size than the matrix.");
  level.kernels->unpack(self, start_of<float>(out));
}

}  // namespace

void bind_pack(nb::module_& m) {
  nb::class_<OwnedMatrix>(m, "Matrix")
      .def(nb::init<int, int64_t, int64_t>(), "format"_a, "num_outputs"_a, "num_inputs"_a)
      .def_ro("num_outputs", &OwnedMatrix::num_outputs)
      .def_ro("num_inputs", &OwnedMatrix::num_inputs)
      .def_ro("num_bytes", &OwnedMatrix::num_bytes)
      .def_prop_ro("format", [](const OwnedMatrix& self) { return int(self.format); })
      .def("set_bias", &set_bias, "bias"_a)
      .def("add_rows", &add_rows, "rows"_a, "first"_a, "count"_a, "type"_a = 0, "scales"_a = nb::none(),
           "mins"_a = nb::none())
      .def("unpack", &unpack, "out"_a.noconvert(), "level"_a);
  nb::class_<Packing>(m, "Packing")
      .def(nb::init<const std::vector<OwnedMatrix*>&>(), "matrices"_a)
      .def("run", &Packing::run, "threads"_a, "num_threads"_a);
}

}  // namespace archerfish
