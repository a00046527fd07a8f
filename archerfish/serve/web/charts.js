// Numbers and drawings of the views: pure functions, and SVG and canvas made of them.

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** The value of a CSS variable of the page, for canvases. */
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Points of a line through values, in a box; gaps where a value is null. A flat line of zeros lies at the bottom. */
export function linePath(values, width, height, most = values.length) {
  const known = values.filter((value) => value !== null), top = Math.max(...known, 0) || 1;
  const step = width / Math.max(1, most - 1), start = width - (values.length - 1) * step;
  let path = "", isOpen = false;
  values.forEach((value, place) => {
    if (value !== null) path += `${isOpen ? "L" : "M"}${(start + place * step).toFixed(1)} ${(height - (value / top) * height).toFixed(1)}`;
    isOpen = value !== null;
  });
  return path;
}

/** Splits runs [kind, count] into cells of `size` blocks each: for each cell, counts by kind. */
export function cellsOf(runs, size) {
  const cells = [];
  let cell = {}, room = size;
  for (const [kind, count] of runs) {
    for (let left = count; left > 0;) {
      const taken = Math.min(left, room);
      cell[kind] = (cell[kind] ?? 0) + taken;
      left -= taken;
      room -= taken;
      if (!room) { cells.push(cell); cell = {}; room = size; }
    }
  }
  if (room < size) cells.push(cell);
  return cells;
}

/** How many blocks a cell of a map stands for, so that there are at most `most` cells: a power of two. */
export function cellSize(total, most) {
  let size = 1;
  while (total / size > most) size *= 2;
  return size;
}

export function cosine(a, b) {
  const lengths = Math.sqrt(dot(a, a) * dot(b, b));
  return lengths ? dot(a, b) / lengths : 0;
}

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

function normalised(vector) {
  const length = Math.sqrt(dot(vector, vector));
  return length ? vector.map((value) => value / length) : vector;
}

/**
 * The coordinates of rows along their `count` principal components, by power iteration; `shares` has how much of the variance
 * each explains. Components are found one after another, and each is kept orthogonal to those before it.
 */
export function pca(rows, count = 2, {rounds = 100, tolerance = 1e-6} = {}) {
  const size = rows[0]?.length ?? 0, mean = new Float64Array(size);
  for (const row of rows) for (let i = 0; i < size; i++) mean[i] += row[i] / rows.length;
  const centered = rows.map((row) => Float64Array.from(row, (value, i) => value - mean[i]));
  const total = centered.reduce((sum, row) => sum + dot(row, row), 0);
  const components = [], shares = [];
  for (let number = 0; number < Math.min(count, size); number++) {
    let vector = orthogonal(Float64Array.from({length: size}, (_, i) => Math.sin(1 + i * (number + 1.7))), components), strength = 0;
    for (let round = 0; round < rounds; round++) {
      const next = new Float64Array(size);
      for (const row of centered) {
        const weight = dot(row, vector);
        for (let i = 0; i < size; i++) next[i] += weight * row[i];
      }
      strength = Math.sqrt(dot(next, next));
      const found = orthogonal(next, components), change = 1 - Math.abs(dot(found, vector));
      vector = found;
      if (change < tolerance * tolerance) break;
    }
    components.push(vector);
    shares.push(total ? strength / total : 0);
  }
  const points = centered.map((row) => components.map((component) => dot(row, component)));
  for (const point of points) while (point.length < count) point.push(0);
  return {points, components, shares};
}

function orthogonal(vector, others) {
  const found = Float64Array.from(vector);
  for (const other of others) {
    const along = dot(found, other);
    for (let i = 0; i < found.length; i++) found[i] -= along * other[i];
  }
  return normalised(found);
}

/** A step of a colour scale for a value from `low` to `high`: 0 to 1. */
export const scaled = (value, low, high) => high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0.5;

/** Lines of a text that are not blank, at most `most`. */
export function linesOf(text, most = Infinity) {
  return text.split(/\r?\n/).map((line) => line.trim()).filter(Boolean).slice(0, most);
}

/** Lists of at most `size` items. */
export function batches(items, size) {
  return Array.from({length: Math.ceil(items.length / size)}, (_, place) => items.slice(place * size, (place + 1) * size));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "\u2013";
  if (seconds < 1) return `${(seconds * 1000).toPrecision(seconds < 0.1 ? 2 : 3).replace(/\.0$/, "")} ms`;
  return seconds < 100 ? `${seconds.toPrecision(3)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export const ago = (seconds) => `${seconds < 60 ? `${seconds.toFixed(seconds < 10 ? 1 : 0)} s` : duration(Math.max(100, seconds))} ago`;

export const percent = (share) => share === null || share === undefined ? "\u2013" : `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;
export const count = (number) => number.toLocaleString("en-US");
