// Checks where Python meets C++: types, sizes and numbers of what Python gives. A wrong one is a ValueError.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdint>

#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace archerfish {

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using WritableArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
template <class T, size_t N>
using Typed = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;  // an array of any shape
using Vector = Typed<float, 1>;
using Ids = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;

inline void check(bool is_right, const char* what) {
  if (!is_right) throw nb::value_error(what);
}

constexpr int64_t kMostSize = int64_t(1) << 28;   // largest dimension: a product of two never overflows
constexpr int64_t kMostBytes = int64_t(1) << 46;  // largest allocation, in bytes

inline int64_t checked_size(int64_t size, const char* what) {
  check(size > 0 && size <= kMostSize, what);
  return size;
}

template <class E>
E checked_enum(int number, E last, const char* what) {
  check(number >= 0 && number <= int(last), what);
  return E(number);
}
inline Activation checked_activation(int number) {
  return checked_enum(number, Activation::kSwigluOai, "There is no such activation.");
}

inline int64_t item_bytes(Type type) { return type == Type::kFloat ? 4 : type == Type::kByte ? 1 : 2; }

// Where the numbers of an array are.
template <class T, class A>
T* start_of(const A& array) {
  T* found = static_cast<T*>(array.data());
  check(reinterpret_cast<uintptr_t>(found) % alignof(T) == 0, "An array is not aligned.");
  return found;
}
template <class T, class A>
T* start_of(const std::optional<A>& array) {
  return array ? start_of<T>(*array) : nullptr;
}

// Where the numbers of an array are, which must have `size` of them.
template <class A>
const float* floats_of(const A& array, int64_t size, const char* what) {
  check(int64_t(array.size()) == size, what);
  return start_of<const float>(array);
}
template <class A>
const float* floats_of(const std::optional<A>& array, int64_t size, const char* what) {
  return array ? floats_of(*array, size, what) : nullptr;
}

// How many rows of `row_bytes` an array of numbers of a type has.
template <class A>
int64_t rows_in(const A& array, Type type, int64_t row_bytes) {
  const int64_t num_bytes = int64_t(array.nbytes()), item = item_bytes(type);
  check(int64_t(array.itemsize()) == item && num_bytes % row_bytes == 0, "An array has another type or width.");
  check(reinterpret_cast<uintptr_t>(array.data()) % uintptr_t(item) == 0, "An array is not aligned.");
  return num_bytes / row_bytes;
}

}  // namespace archerfish
