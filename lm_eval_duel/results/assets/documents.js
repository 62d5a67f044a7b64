// Documents: tokens coloured by nats or by reveal step, two orders side by side, a slider that plays the unmasking.
if (document.getElementById("documents")) {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("documents-data").textContent);
  const slider = find("step"), play = find("play"), chooser = find("document");
  const MOST_NATS = 8; // the reddest, as the page says

  // When the sampler reveals each token: it writes one block after the other.
  function schedule(order) {
    const at = [], share = [];
    let total = 0;
    order.starts.forEach((start, block) => {
      const steps = order.steps.slice(start, order.starts[block + 1]);
      const last = Math.max(...steps);
      for (const step of steps) {
        at.push(total + step + 1);
        share.push(last ? step / last : 0);
      }
      total += last + 1;
    });
    return { at, share, total };
  }

  class Side {
    constructor(name) {
      this.root = find(name);
      this.select = find(`${name}-order`);
      this.tokens = this.root.querySelector(".tokens");
      this.select.addEventListener("change", () => { this.show(); refresh(); });
      this.tokens.addEventListener("pointerover", ({ target }) => {
        if (target !== this.tokens) this.point(this.spans.indexOf(target));
      });
      this.tokens.addEventListener("keydown", (event) => {
        const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!move) return;
        event.preventDefault();
        this.point(Math.min(this.spans.length - 1, Math.max(0, this.here + move)));
      });
    }
    write(line, text) { this.root.querySelector(line).textContent = text; }
    load(text, first) {
      this.text = text;
      this.select.replaceChildren(...text.orders.map((order, n) => new Option(order.label, n, false, n === first)));
      this.root.hidden = text.orders.length <= first;
      if (!this.root.hidden) this.show();
    }
    show() {
      this.order = this.text.orders[this.select.value];
      this.plan = schedule(this.order);
      this.here = -1;
      this.spans = this.text.pieces[this.order.text].map((piece) => {
        const span = document.createElement("span");
        span.textContent = piece;
        return span;
      });
      this.nats = this.order.nats.map((value) => value ?? Infinity);
      this.tokens.replaceChildren(...this.spans);
      const sum = this.nats.reduce((a, b) => a + b, 0), count = this.spans.length;
      const perplexity = `perplexity ${Math.exp(sum / count).toFixed(2)} per token`;
      this.write(".sum", `${sum.toFixed(1)} nats, ${perplexity}, ${this.plan.total} steps for ${count} tokens`);
    }
    point(n) {
      this.spans[this.here]?.classList.remove("here");
      this.here = n;
      const span = this.spans[n], block = this.order.starts.filter((start) => start <= n).length;
      span.classList.add("here");
      const text = `“${span.textContent.replace(/\n/g, "⏎")}”: ${this.nats[n].toFixed(2)} nats`;
      const what = span.matches(".masked") ? "still masked" : text;
      this.write(".token", `Token ${n + 1}, ${what}, revealed at step ${this.order.steps[n] + 1} of block ${block}`);
    }
    draw(step, byStep) {
      const { at, share, total } = this.plan, time = Math.min(step, total);
      this.spans.forEach((span, n) => {
        span.classList.toggle("masked", at[n] > time);
        span.classList.toggle("now", at[n] === step && step < Number(slider.max));
        span.style.setProperty("--share", byStep ? share[n] : Math.min(this.nats[n] / MOST_NATS, 1));
      });
      const spent = this.nats.filter((_, n) => at[n] <= time);
      const nats = spent.reduce((a, b) => a + b, 0).toFixed(1);
      this.write(".progress", `step ${time} of ${total}: ${spent.length} of ${at.length} tokens, ${nats} nats so far`);
    }
  }
  const sides = [new Side("left"), new Side("right")];
  const shown = () => sides.filter((side) => !side.root.hidden);

  function draw() {
    const byStep = find("by-step").checked;
    find("documents").classList.toggle("by-step", byStep);
    find("step-text").textContent = `${slider.value} of ${slider.max}`;
    for (const side of shown()) side.draw(Number(slider.value), byStep);
  }
  // At the end of the slider everything is revealed; it stays there when another order is chosen.
  function refresh(end = slider.value === slider.max) {
    slider.max = Math.max(...shown().map((side) => side.plan.total));
    if (end) slider.value = slider.max;
    draw();
  }
  // The first two orders that differ, of networks that have a choice.
  function choose() {
    stop();
    const text = data[chooser.value], orders = text.orders;
    const left = Math.max(0, orders.findIndex((order) => order.starts.length < order.steps.length));
    const other = orders.findIndex((order, n) => n > left && String(order.steps) !== String(orders[left].steps));
    sides[0].load(text, left);
    sides[1].load(text, other >= 0 ? other : orders.length > 1 ? Number(left === 0) : orders.length);
    refresh(true);
  }

  let timer = null;
  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }
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
  for (const radio of document.querySelectorAll("[name=colour]")) radio.addEventListener("change", draw);
  chooser.append(...data.map((text, n) => new Option(`${text.task}, document ${text.number}`, n)));
  chooser.addEventListener("change", choose);
  choose();
}
