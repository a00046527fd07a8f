// What all bindings share.
#pragma once
#include <cstring>
#include <memory>

#include "bind_checks.h"
#include "layout.h"
#include "pack.h"
#include "tape.h"

namespace archerfish {

// A matrix: rows are added to it, then it is packed, together with others.
struct OwnedMatrix : Matrix {
  struct Part {
    SourceRows rows;
    std::optional<Array> arrays[3];  // that they lie in
  };
  std::shared_ptr<uint8_t> memory;  // of all matrices that were packed with it
  std::vector<Part> parts;          // to be packed
  std::vector<float> bias_memory;
  int64_t num_bytes;

  OwnedMatrix(int wanted, int64_t outputs, int64_t inputs) {
    format = checked_enum(wanted, Format::kMxfp4, "There is no such format.");
    num_outputs = checked_size(outputs, "A matrix has too few or too many outputs.");
    num_inputs = checked_size(inputs, "A matrix has too few or too many inputs.");
    const int64_t unit = is_super(format) ? kBlock * kSuper : is_plain(format) || format == Format::kInt8 ? 1 : kBlock;
    check(num_inputs % unit == 0, "The inputs of a matrix are no whole blocks.");
    bias = nullptr;
    num_bytes = packed_bytes(format, outputs, inputs);
    data = nullptr;
  }
};

// Computing without the interpreter lock. When the process ends, it waits for such work, and other threads than the
// last never begin any: Python 3.11 to 3.13 end a thread that wants its lock back too late, which C++ does not survive.
struct Computing {
  Computing();
  ~Computing();
};
struct Released {
  Computing computing;  // the first: it is ended with the lock
  nb::gil_scoped_release released;
};

struct Level {
  const Kernels* kernels;
};

void bind_pack(nb::module_& m);
void bind_wkv(nb::module_& m);
void bind_sample(nb::module_& m);

}  // namespace archerfish
