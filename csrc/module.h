// What all bindings share.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>

#include "pack.h"
#include "tape.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace archerfish {

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using WritableArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;

inline const void* address(const std::optional<Array>& array) { return array ? array->data() : nullptr; }
inline const float* floats(const std::optional<Array>& array) { return static_cast<const float*>(address(array)); }

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
    format = Format(wanted), num_outputs = outputs, num_inputs = inputs, bias = nullptr;
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
