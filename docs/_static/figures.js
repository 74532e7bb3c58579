// The figures that a reader can move: plain SVG, whole numbers where the book has fractions. `<!-- figure: name -->` in a notebook places one.
"use strict";
(() => {
  const gcd = (a, b) => b ? gcd(b, a % b) : a;
  const fraction = (a, b) => { const g = gcd(a, b) || 1; return b / g === 1 ? `${a / g}` : `${a / g}/${b / g}`; };
  const sum = xs => xs.reduce((a, b) => a + b, 0);
  const svg = (tag, attrs, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [k, v] of Object.entries(attrs)) node.setAttribute(k, v);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const label = (x, y, text, more = {}) => svg("text", { x, y, "text-anchor": "middle", ...more }, text);

  // A figure is a drawing, labelled sliders and one sentence that says all its numbers
  function build(figure, title, size, dials, draw) {
    const picture = svg("svg", { viewBox: `0 0 ${size}`, role: "img", "aria-label": title });
    const box = document.createElement("div"), says = document.createElement("p"), caption = document.createElement("figcaption");
    box.className = "dials"; says.className = "says"; says.setAttribute("role", "status"); caption.textContent = title;
    const inputs = dials.map(([name, text, min, max, step, value, style]) => {
      const row = document.createElement("label"), input = document.createElement("input"), output = document.createElement("output");
      row.append(Object.assign(document.createElement("span"), { textContent: text, className: style || "" }), input, output);
      Object.assign(input, { type: "range", name, min, max, step, value });
      input.addEventListener("input", show);
      box.append(row);
      return input;
    });
    function show(event) {
      const values = draw(inputs.map(i => Number(i.value)), inputs.indexOf(event && event.target));
      inputs.forEach((input, i) => { input.value = values.at[i]; input.nextSibling.textContent = input.value; });
      picture.replaceChildren(...values.shapes);
      says.innerHTML = Object.entries(values.says).map(([k, [name, v]]) => `${name} <b data-value="${k}">${v}</b>`).join(" · ");
    }
    figure.replaceChildren(caption, picture, box, says);
    show();
  }

  const words = ["the", "cat", "sat"], three = [0, 1, 2];
  function laws(figure) {
    const weights = (k, start) => words.map((w, i) => [`${k}${i}`, `${k}: ${w}`, 0, 9, 1, start[i], k]);
    build(figure, "Two distributions on three words, made of whole-number weights that you can move: the target p in blue, the draft q in amber; outlined in red, the residual of p", "480 200", [...weights("p", [3, 3, 2]), ...weights("q", [1, 1, 6])], (at, moved) => {
      for (const k of [0, 3]) if (!sum(at.slice(k, k + 3))) at[moved] = 1;       // some weight must stay
      const a = at.slice(0, 3), b = at.slice(3), A = sum(a), B = sum(b), all = A * B;
      const share = three.map(i => Math.min(a[i] * B, b[i] * A)), more = three.map(i => Math.max(a[i] * B - b[i] * A, 0));
      const β = sum(share), left = sum(more), r = left ? more.map(m => fraction(m, left)) : a.map(x => fraction(x, A));
      const y = w => 165 - 140 * w, bar = (i, k, w, style, from = 0) => svg("rect", { x: 45 + 150 * i + 42 * k, y: y(from + w), width: 38, height: 140 * w, class: style });
      const shapes = three.flatMap(i => [
        bar(i, 0, a[i] / A, "p"), bar(i, 1, b[i] / B, "q"), bar(i, 0, more[i] / all, "rest", share[i] / all),
        label(64 + 150 * i, y(a[i] / A) - 6, fraction(a[i], A)), label(106 + 150 * i, y(b[i] / B) - 6, fraction(b[i], B)), label(85 + 150 * i, 185, words[i])]);
      return { at, shapes: [svg("line", { x1: 20, x2: 460, y1: 165, y2: 165, class: "axis" }), ...shapes],
        says: { beta: ["overlap: β =", fraction(β, all)], rest: ["residual mass: 1 − β =", fraction(left, all)], residual: [left ? "the residual r =" : "no residual, r = p =", r.join(", ")] } };
    });
  }

  const speed = (α, γ, c) => sum(Array.from({ length: γ + 1 }, (_, i) => α ** i)) / (γ * c + 1);   // Theorem 3.8, the geometric sum written out
  const best = (α, c) => { let γ = 0; while (γ < 64 && speed(α, γ + 1, c) > speed(α, γ, c)) γ++; return γ; };
  function cost(figure) {
    const most = 20;
    build(figure, "Speed-up over γ, the number of drafted tokens, at acceptance rate α when a draft step costs c target steps; a dot marks the chosen γ, a red square the best", "480 220", [["alpha", "α", 0, 0.99, 0.01, 0.8], ["gamma", "γ", 0, most, 1, 5], ["c", "c", 0.01, 1, 0.01, 0.05]], at => {
      const [α, γ, c] = at, g = best(α, c), curve = Array.from({ length: most + 1 }, (_, i) => speed(α, i, c)), top = Math.max(2, Math.ceil(Math.max(...curve)));
      const x = i => 40 + 420 * i / most, y = s => 185 - 165 * s / top, S = speed(α, γ, c);
      const ticks = [0, 5, 10, 15, 20].map(i => label(x(i), 203, i)), rows = Array.from({ length: top + 1 }, (_, i) => label(25, y(i) + 4, i));
      const shapes = [svg("line", { x1: 40, x2: 460, y1: y(0), y2: y(0), class: "axis" }), svg("line", { x1: 40, x2: 460, y1: y(1), y2: y(1), class: "axis", "stroke-dasharray": "3 4" }),
        svg("polyline", { points: curve.map((s, i) => `${x(i)},${y(s)}`).join(" "), class: "curve" }), svg("circle", { cx: x(γ), cy: y(S), r: 6, class: "p" }),
        ...(g <= most ? [svg("rect", { x: x(g) - 4, y: y(speed(α, g, c)) - 4, width: 8, height: 8, class: "best" })] : []), ...ticks, ...rows, label(250, 218, "γ")];
      return { at, shapes, says: { speed: ["speed-up S =", S.toFixed(3)], best: ["best γ =", g], most: ["with S =", speed(α, g, c).toFixed(3)] } };
    });
  }

  const weights = 32 * (2 * 4096 ** 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256, bytes = 3.35e12, flops = 989e12;   // Llama 3.1 8B, one H100
  const pass = (m, B, S) => Math.max(2 * weights / bytes, 2 * weights * m * B / flops) + Math.max(131072 / bytes, 4 * 32 * 4096 * m / flops) * S * B;
  const gain = (B, S, α, γ, c) => { const plain = pass(1, B, S); return sum(Array.from({ length: γ + 1 }, (_, i) => α ** i)) * plain / (γ * c * plain + pass(γ + 1, B, S)); };
  function batch(figure) {
    const most = 1024, steps = 100;
    build(figure, "Modelled speed-up over the batch, 1 to 1024 on a logarithmic axis, of Llama 3.1 8B on one H100 with a chain of γ drafts; a dot marks the chosen batch, the dashed line is plain decoding", "480 220", [["batch", "batch", 1, most, 1, 32], ["context", "tokens", 0, 32000, 500, 500], ["alpha", "α", 0, 0.99, 0.01, 0.8], ["gamma", "γ", 1, 10, 1, 4], ["c", "c", 0, 0.5, 0.01, 0.05]], at => {
      const [B, S, α, γ, c] = at, curve = Array.from({ length: steps + 1 }, (_, i) => gain(most ** (i / steps), S, α, γ, c)), top = Math.max(2, Math.ceil(Math.max(...curve)));
      const x = b => 40 + 420 * Math.log(b) / Math.log(most), y = s => 185 - 165 * s / top, here = gain(B, S, α, γ, c);
      let last = 0;
      for (let b = 1; b <= most; b++) if (gain(b, S, α, γ, c) > 1) last = b;
      const ticks = [1, 4, 16, 64, 256, 1024].map(b => label(x(b), 203, b)), rows = Array.from({ length: top + 1 }, (_, i) => label(25, y(i) + 4, i));
      const shapes = [svg("line", { x1: 40, x2: 460, y1: y(0), y2: y(0), class: "axis" }), svg("line", { x1: 40, x2: 460, y1: y(1), y2: y(1), class: "axis", "stroke-dasharray": "3 4" }),
        svg("polyline", { points: curve.map((s, i) => `${x(most ** (i / steps))},${y(s)}`).join(" "), class: "curve" }), svg("circle", { cx: x(B), cy: y(here), r: 6, class: "p" }), ...ticks, ...rows, label(250, 218, "batch")];
      return { at, shapes, says: { speed: ["speed-up", here.toFixed(3)], last: ["the largest batch that gains", last || "none"] } };
    });
  }

  const figures = { laws, cost, batch };
  document.querySelectorAll("figure.moving").forEach(f => figures[f.dataset.figure](f));
})();
