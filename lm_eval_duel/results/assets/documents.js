// Documents: tokens coloured by nats or by reveal step, two orders side by side, a slider that plays the unmasking.
if (document.getElementById("documents")) {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("documents-data").textContent);
  const slider = find("step"), play = find("play"), chooser = find("document");
  const MOST_NATS = 8; // the reddest, as the page says

  const sum = (values) => values.reduce((a, b) => a + b, 0);

  class Side {
    constructor(name) {
      this.root = find(name);
      this.select = find(`${name}-order`);
      this.tokens = this.root.querySelector(".tokens");
      this.select.addEventListener("change", () => { this.show(); refresh(); });
      this.tokens.addEventListener("pointerover", ({ target }) => this.point(this.spans.indexOf(target)));
      this.tokens.addEventListener("keydown", (event) => {
        const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!move) return;
        event.preventDefault();
        this.point(this.here + move);
      });
    }
    write(line, text) { this.root.querySelector(line).textContent = text; }
    load(text, first) {
      this.text = text;
      this.select.replaceChildren(...text.orders.map((order, n) => new Option(order.label, n, false, n === first)));
      this.show();
    }
    show() {
      this.order = this.text.orders[this.select.value];
      this.here = -1;
      this.write(".token", "Point at a token, or use the arrow keys.");
      this.spans = this.text.pieces[this.order.text].map((piece) => {
        const span = document.createElement("span");
        span.textContent = piece;
        return span;
      });
      this.tokens.replaceChildren(...this.spans);
      this.nats = this.order.nats.map((value) => value ?? Infinity);
      this.schedule();
      const nats = sum(this.nats), count = this.spans.length;
      const perplexity = `perplexity ${Math.exp(nats / count).toFixed(2)} per token`;
      this.write(".sum", `${nats.toFixed(1)} nats, ${perplexity}, ${this.total} steps for ${count} tokens`);
    }
    // When the sampler reveals each token: it writes one block after the other.
    schedule() {
      const { starts, steps } = this.order;
      Object.assign(this, { at: [], share: [], total: 0 });
      starts.forEach((start, block) => {
        const own = steps.slice(start, starts[block + 1]), last = Math.max(...own);
        this.at.push(...own.map((step) => this.total + step + 1));
        this.share.push(...own.map((step) => (last ? step / last : 0)));
        this.total += last + 1;
      });
    }
    point(n) {
      if (!this.spans[n]) return;
      this.spans[this.here]?.classList.remove("here");
      this.here = n;
      this.spans[n].classList.add("here");
      this.describe();
    }
    // The line on the token that is pointed at, as it is at this step.
    describe() {
      const n = this.here, span = this.spans[n];
      if (!span) return;
      const block = this.order.starts.filter((start) => start <= n).length;
      const text = `“${span.textContent.replace(/\n/g, "⏎")}”: ${this.nats[n].toFixed(2)} nats`;
      const what = span.matches(".masked") ? "still masked" : text;
      this.write(".token", `Token ${n + 1}, ${what}, revealed at step ${this.order.steps[n] + 1} of block ${block}`);
    }
    draw(step, byStep) {
      const time = Math.min(step, this.total);
      this.spans.forEach((span, n) => {
        span.classList.toggle("masked", this.at[n] > time);
        span.classList.toggle("now", this.at[n] === step && step < Number(slider.max));
        span.style.setProperty("--share", byStep ? this.share[n] : Math.min(this.nats[n] / MOST_NATS, 1));
      });
      const spent = this.nats.filter((_, n) => this.at[n] <= time);
      const progress = `${spent.length} of ${this.at.length} tokens, ${sum(spent).toFixed(1)} nats so far`;
      this.write(".progress", `step ${time} of ${this.total}: ${progress}`);
      this.describe();
    }
  }
  const sides = [new Side("left"), new Side("right")];

  function draw() {
    const byStep = find("documents").classList.toggle("by-step", find("by-step").checked);
    find("step-text").textContent = `${slider.value} of ${slider.max}`;
    for (const side of sides) side.draw(Number(slider.value), byStep);
  }
  // At the end of the slider everything is revealed; it stays there when another order is chosen.
  function refresh(end = slider.value === slider.max) {
    slider.max = Math.max(...sides.map((side) => side.total));
    if (end) slider.value = slider.max;
    draw();
  }
  // Two orders to open on: two that differ, of the network with the most orders, first those in its largest blocks.
  function pair(orders) {
    const network = (n) => orders[n].label.split(", ")[0];
    const count = (n) => free.filter((other) => network(other) === network(n)).length;
    const differ = (n, other) => String(orders[n].steps) !== String(orders[other].steps);
    const all = [...orders.keys()];
    const free = all.filter((n) => orders[n].starts.length < orders[n].steps.length); // a causal network has no choice
    free.sort((a, b) => count(b) - count(a) || orders[a].starts.length - orders[b].starts.length);
    const left = free[0] ?? 0;
    const right = free.find((n) => network(n) === network(left) && differ(n, left))
      ?? all.find((n) => differ(n, left)) ?? all.find((n) => n !== left) ?? left;
    return [left, right];
  }
  // A document opens at a third of its steps, where some tokens are revealed and others are masked.
  function choose() {
    stop();
    const text = data[chooser.value];
    pair(text.orders).forEach((order, n) => sides[n].load(text, order));
    sides[1].root.hidden = text.orders.length === 1;
    refresh(false);
    slider.value = Math.round(slider.max / 3);
    draw();
  }

  let timer;
  function stop() {
    clearInterval(timer);
    play.textContent = "Play";
  }
  play.addEventListener("click", () => {
    if (play.textContent === "Pause") return stop();
    if (slider.value === slider.max) slider.value = 0;
    play.textContent = "Pause";
    draw();
    timer = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      draw();
      if (slider.value === slider.max) stop();
    }, Math.max(30, Math.min(250, 16000 / slider.max)));
  });
  slider.addEventListener("input", () => { stop(); draw(); });
  for (const radio of document.querySelectorAll("[name=colour]")) radio.addEventListener("change", draw);
  chooser.append(...data.map((text, n) => new Option(text.title, n)));
  chooser.addEventListener("change", choose);
  choose();
}
