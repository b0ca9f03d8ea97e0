// Formats numbers for people; a figure that is not known is a dash.

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Three significant digits, without an exponent for usual sizes: 0.0123, 1.23, 123, 12,300. */
export function number(value) {
  if (!known(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export const integer = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");

/** A duration: 850 µs, 12.3 ms, 4.56 s, 3 min 20 s, 2 h 05 min. */
export function seconds(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${(value * 1e6).toPrecision(3)} µs`;
  if (size < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (size < 60) return `${Number(value.toPrecision(3))} s`;
  if (size < 3600) return `${Math.floor(value / 60)} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  if (size < 172800) return `${Math.floor(value / 3600)} h ${String(Math.floor(value / 60) % 60).padStart(2, "0")} min`;
  return `${Math.floor(value / 86400)} d ${String(Math.floor(value / 3600) % 24).padStart(2, "0")} h`;
}

/** A count with a letter: 950, 12.3k, 4.56M. */
export function count(value) {
  if (!known(value)) return "–";
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= unit) return `${Number((value / unit).toPrecision(3))}${letter}`;
  }
  return String(Number(value.toPrecision(3)));
}

export function bytes(value) {
  if (!known(value)) return "–";
  let unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(value) < 1000) break;
    value /= 1024;
    unit = larger;
  }
  return `${unit === "B" ? Math.round(value) : Number(value.toPrecision(3))} ${unit}`;
}

export function percent(fraction) {
  if (!known(fraction)) return "–";
  const value = fraction * 100;
  return `${value !== 0 && Math.abs(value) < 9.95 ? value.toFixed(1) : Math.round(value)}%`;
}

/** The time of day of a Unix time, with the date if it is not that of `beside`, by default today. */
export function clock(time, beside = Date.now() / 1000) {
  if (!known(time)) return "–";
  const date = new Date(time * 1000);
  const day = date.toDateString() === new Date((beside ?? time) * 1000).toDateString() ? "" : `${date.toLocaleDateString("en-CA")} `;
  return day + date.toLocaleTimeString("en-GB");
}

export const steps = (value) => `${integer(value)} ${value === 1 ? "step" : "steps"}`;
