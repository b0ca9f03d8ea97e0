// The calculators of the handbook: forms over the coefficients that the build exports from the planner.
"use strict";

(() => {
  const planner = window.MESHWRIGHT_PLANNER;
  const line = ([start, slope], x) => start + slope * x;

  const number = (name, label, value, options = {}) => ({ name, label, value, ...options });
  const choice = (name, label, values, value, texts = {}) => ({ name, label, values, value, texts });
  const models = Object.keys(planner.state);
  const levels = Object.keys(planner.levels);
  const levelTexts = Object.fromEntries(levels.map((level) => [level, `${level} (${planner.levels[level]})`]));

  const formats = {
    bytes(value) {
      const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
      let index = 0;
      while (Math.abs(value) >= 1024 && index < units.length - 1) { value /= 1024; index += 1; }
      return `${Number(value.toPrecision(3))} ${units[index]}`;
    },
    percent: (value) => `${(100 * value).toFixed(1)} %`,
    integer: (value) => Math.round(value).toLocaleString("en"),
    factor: (value) => `${Number(value.toPrecision(4))}`,
    seconds(value) {
      if (value >= 3600) return `${Number((value / 3600).toPrecision(3))} h`;
      if (value >= 60) return `${Number((value / 60).toPrecision(3))} min`;
      return value >= 1 ? `${Number(value.toPrecision(3))} s` : `${Number((1000 * value).toPrecision(3))} ms`;
    },
  };

  // Each calculator: its fields, and what it computes from their values as [name, label, value, format].
  const calculators = {
    state: {
      fields: [
        choice("model", "model", models, "llama-8b"),
        choice("level", "what is sharded", levels, "parameters", levelTexts),
        choice("ranks", "data-parallel ranks", planner.ranks, 64),
        choice("accumulates", "micro-batches per step", [1, 2], 2, { 1: "one", 2: "two or more" }),
      ],
      compute({ model, level, ranks, accumulates }) {
        const [parameter, gradient, optimizer] = planner.state[model][level][accumulates][planner.ranks.indexOf(Number(ranks))];
        return [
          ["parameter", "parameters", parameter, "bytes"],
          ["gradient", "gradients", gradient, "bytes"],
          ["optimizer", "optimizer state", optimizer, "bytes"],
          ["total", "total per rank", parameter + gradient + optimizer, "bytes"],
        ];
      },
    },
    ring: {
      fields: [
        choice("collective", "collective", Object.keys(planner.wire), "all_reduce"),
        number("message", "message (GB)", 2, { step: "any" }),
        number("ranks", "ranks", 8),
        number("bandwidth", "bandwidth per rank (GB/s)", 50, { step: "any" }),
      ],
      compute({ collective, message, ranks, bandwidth }) {
        const sent = ranks < 2 ? 0 : line(planner.wire[collective], 1 / ranks) * message * 1e9;
        return [
          ["sent", "sent by each rank", sent, "bytes"],
          ["share", "per byte of the message", sent / (message * 1e9), "factor"],
          ["seconds", "time for the bytes alone", sent / (bandwidth * 1e9), "seconds"],
        ];
      },
    },
    volume: {
      fields: [
        choice("level", "what is sharded", levels, "parameters", levelTexts),
        number("ranks", "data-parallel ranks", 64),
        number("accumulation", "micro-batches per step", 4),
        number("parameters", "parameters of the model (billions)", 8, { step: "any" }),
      ],
      compute({ level, ranks, accumulation, parameters }) {
        const factor = ((ranks - 1) / ranks) * line(planner.volume[level], accumulation);
        const ddp = ((ranks - 1) / ranks) * line(planner.volume.none, accumulation);
        return [
          ["factor", "times the bytes of the parameters", factor, "factor"],
          ["sent", "sent by each rank per step, in float32", factor * parameters * 4e9, "bytes"],
          ["ratio", "compared with DDP", factor / ddp, "factor"],
        ];
      },
    },
    bubble: {
      fields: [
        choice("schedule", "schedule", Object.keys(planner.schedules), "1f1b"),
        number("ranks", "pipeline ranks P", 4),
        number("micro", "micro-batches M", 16),
        number("stages", "stages per rank V", 1),
      ],
      compute({ schedule, ranks, micro, stages }) {
        const row = planner.schedules[schedule];
        const perRank = Math.min(Math.max(stages, row.stages[0]), row.stages[1]);
        const divisor = line(row.divisor, perRank);
        const results = [["bubble", `idle share, with ${perRank} stage${perRank > 1 ? "s" : ""} per rank`,
          (ranks - 1) / (divisor * micro + ranks - 1), "percent"]];
        if (row.in_flight) {
          const live = row.in_flight === "all" ? micro : Math.min(micro, ranks);
          results.push(["in_flight", "micro-batches in flight on the first rank", live, "integer"]);
        }
        return results;
      },
    },
    batch: {
      fields: [
        number("devices", "devices", 64),
        number("tensor", "tensor", 8),
        number("pipeline", "pipeline", 2),
        number("context", "context", 1),
        number("micro", "micro-batch", 1),
        number("accumulation", "accumulation", 8),
        number("sequence", "tokens per sample", 8192),
      ],
      compute({ devices, tensor, pipeline, context, micro, accumulation, sequence }) {
        const degree = devices / (tensor * pipeline * context);
        if (!Number.isInteger(degree)) return [["degree", "data-parallel degree: the degrees do not divide the devices", NaN, "factor"]];
        return [
          ["degree", "data-parallel degree", degree, "integer"],
          ["global", "global batch, in samples", micro * degree * accumulation, "integer"],
          ["tokens", "tokens per step", micro * degree * accumulation * sequence, "integer"],
        ];
      },
    },
    activations: {
      fields: [
        choice("model", "model", models, "llama-8b"),
        choice("mode", "activation checkpointing", ["none", "selective", "full"], "none"),
        number("micro", "micro-batch", 1),
        number("sequence", "tokens per sample", 8192),
      ],
      compute({ model, mode, micro, sequence }) {
        const row = planner.activations[model];
        const block = line(row.modes[mode], micro * sequence);
        return [
          ["block", "saved per block", block, "bytes"],
          ["all", `saved by ${row.layers} blocks`, block * row.layers, "bytes"],
          ["share", "compared with none", block / line(row.modes.none, micro * sequence), "percent"],
        ];
      },
    },
    checkpoint: {
      fields: [
        number("stall", "stall of one save (s)", 2, { step: "any" }),
        number("failures", "mean time between failures (h)", 8, { step: "any" }),
        number("restart", "time to run again (s)", 120, { step: "any" }),
      ],
      compute({ stall, failures, restart }) {
        const between = failures * 3600;
        const interval = Math.sqrt(2 * stall * between);
        return [
          ["interval", "interval between checkpoints", interval, "seconds"],
          ["lost", "share of the time that is lost", stall / interval + (interval / 2 + restart) / between, "percent"],
        ];
      },
    },
  };

  function field(spec) {
    const label = document.createElement("label");
    const text = document.createElement("span");
    text.textContent = spec.label;
    const input = document.createElement(spec.values ? "select" : "input");
    input.name = spec.name;
    if (spec.values) {
      for (const value of spec.values) {
        const option = new Option(spec.texts[value] ?? value, value, false, String(value) === String(spec.value));
        input.append(option);
      }
    } else {
      Object.assign(input, { type: "number", min: spec.step ? "0" : "1", step: spec.step ?? "1", value: spec.value });
    }
    label.append(text, input);
    return label;
  }

  function values(form) {
    return Object.fromEntries([...form.elements].filter((input) => input.name).map((input) => [
      input.name, input.tagName === "SELECT" ? input.value : Number(input.value),
    ]));
  }

  function show(form, output, compute) {
    const rows = compute(values(form)).map(([name, label, value, format]) => {
      const row = document.createElement("div");
      row.dataset.result = name;
      row.dataset.value = value;
      const key = document.createElement("span");
      key.textContent = label;
      const shown = document.createElement("strong");
      shown.textContent = Number.isFinite(value) ? formats[format](value) : "–";
      row.append(key, shown);
      return row;
    });
    output.replaceChildren(...rows);
  }

  for (const place of document.querySelectorAll("[data-calculator]")) {
    const { fields, compute } = calculators[place.dataset.calculator];
    const form = document.createElement("form");
    const output = document.createElement("output");
    form.append(...fields.map(field));
    form.addEventListener("input", () => show(form, output, compute));
    form.addEventListener("submit", (event) => event.preventDefault());
    place.replaceChildren(form, output);
    show(form, output, compute);
  }
})();
