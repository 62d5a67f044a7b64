// The document view: tokens coloured by nats or by reveal step, a slider that plays the unmasking, two orders side by side.
(() => {
  const section = document.getElementById("documents");
  if (!section) return;
  const data = JSON.parse(document.getElementById("documents-data").textContent);
  const find = (id) => document.getElementById(id);
  const MOST_NATS = 8; // the reddest
  const slider = find("step"), play = find("play"), chooser = find("document");
  const byStep = () => section.querySelector("input[name=colour]:checked").value === "step";

  // When each token is revealed by the sampler, which writes one block after the other.
  function schedule(order) {
    const at = [], share = [];
    let before = 0;
    order.starts.forEach((start, block) => {
      const end = order.starts[block + 1] ?? order.steps.length;
      const steps = order.steps.slice(start, end);
      const last = steps.reduce((a, b) => Math.max(a, b), 0);
      for (const step of steps) { at.push(before + step + 1); share.push(last ? step / last : 0); }
      before += last + 1;
    });
    return { at, share, total: before };
  }
  const nats = (value) => value === null ? "∞" : value.toFixed(2);

  class Side {
    constructor(name) {
      this.root = find(name);
      this.select = find(`${name}-order`);
      this.tokens = this.root.querySelector(".tokens");
      this.here = -1;
      this.select.addEventListener("change", () => { this.show(); refresh(); });
      this.tokens.addEventListener("pointerover", (event) => { if (event.target.dataset.n) this.tell(Number(event.target.dataset.n)); });
      this.tokens.addEventListener("keydown", (event) => {
        const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!move) return;
        event.preventDefault();
        this.spans[this.here]?.classList.remove("here");
        this.here = Math.min(this.spans.length - 1, Math.max(0, this.here + move));
        this.spans[this.here]?.classList.add("here");
        this.tell(this.here);
      });
    }
    load(text, first) {
      this.text = text;
      this.select.replaceChildren(...text.orders.map((order, n) => new Option(order.label, n, false, n === first)));
      this.root.hidden = text.orders.length <= first;
      if (!this.root.hidden) this.show();
    }
    show() {
      this.order = this.text.orders[this.select.value];
      this.pieces = this.text.pieces[this.order.text];
      this.plan = schedule(this.order);
      this.here = -1;
      this.spans = this.pieces.map((piece, n) => {
        const span = document.createElement("span");
        span.textContent = piece;
        span.dataset.n = n;
        return span;
      });
      this.tokens.replaceChildren(...this.spans);
      const finite = this.order.nats.every((value) => value !== null);
      const sum = finite ? this.order.nats.reduce((a, b) => a + b, 0) : Infinity;
      const perplexity = Math.exp(sum / this.pieces.length);
      const line = this.root.querySelector(".sum");
      line.dataset.order = this.order.label;
      line.textContent = `${sum.toFixed(1)} nats, perplexity ${perplexity.toFixed(2)} per token, ${this.plan.total} steps for ${this.pieces.length} tokens`;
    }
    tell(n) {
      const masked = this.spans[n].classList.contains("masked");
      const block = this.order.starts.filter((start) => start <= n).length;
      const what = masked ? "still masked" : `“${this.pieces[n].replace(/\n/g, "⏎")}”: ${nats(this.order.nats[n])} nats`;
      this.root.querySelector(".token").textContent = `Token ${n + 1}, ${what}, revealed at step ${this.order.steps[n] + 1} of block ${block}`;
    }
    draw(step) {
      if (this.root.hidden) return;
      const time = Math.min(step, this.plan.total), coloured = byStep();
      let revealed = 0, spent = 0;
      this.spans.forEach((span, n) => {
        const there = this.plan.at[n] <= time, value = this.order.nats[n] ?? Infinity;
        span.classList.toggle("masked", !there);
        span.classList.toggle("now", this.plan.at[n] === time && step <= this.plan.total && step < Number(slider.max));
        span.style.setProperty("--share", coloured ? this.plan.share[n] : Math.min(value / MOST_NATS, 1).toFixed(3));
        if (there) { revealed += 1; spent += value; }
      });
      this.root.querySelector(".progress").textContent = `step ${time} of ${this.plan.total}: ${revealed} of ${this.spans.length} tokens, ${spent.toFixed(1)} nats so far`;
    }
  }
  const sides = [new Side("left"), new Side("right")];

  function draw() {
    section.classList.toggle("by-step", byStep());
    find("scale-low").textContent = byStep() ? "first in its block" : "0 nats";
    find("scale-high").textContent = byStep() ? "last" : `${MOST_NATS} or more`;
    for (const side of sides) side.draw(Number(slider.value));
    find("step-text").textContent = `${slider.value} of ${slider.max}`;
  }
  // At the end of the slider everything is revealed; it stays there when another order is chosen.
  function refresh() {
    const end = slider.value === slider.max;
    slider.max = Math.max(...sides.filter((side) => !side.root.hidden).map((side) => side.plan.total));
    if (end) slider.value = slider.max;
    draw();
  }
  function choose() {
    stop();
    const text = data[chooser.value];
    // First two orders that differ, of networks that have a choice.
    const orders = text.orders, left = Math.max(0, orders.findIndex((order) => order.starts.length < order.steps.length));
    const other = orders.findIndex((order, n) => n > left && String(order.steps) !== String(orders[left].steps));
    sides[0].load(text, left);
    sides[1].load(text, other >= 0 ? other : orders.length > 1 ? Number(left === 0) : orders.length);
    slider.value = slider.max;
    refresh();
  }

  let timer = null;
  function stop() { clearInterval(timer); timer = null; play.textContent = "Play"; }
  play.addEventListener("click", () => {
    if (timer !== null) return stop();
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
  for (const radio of section.querySelectorAll("input[name=colour]")) radio.addEventListener("change", draw);
  section.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  chooser.append(...data.map((text, n) => new Option(`${text.task}, document ${text.number}`, n)));
  chooser.addEventListener("change", choose);
  section.hidden = false;
  slider.max = 0;
  choose();
})();
