"use strict";
// Sorting, filtering, columns and details of the tables. Every text goes through textContent.
(() => {
  const cellValue = (row, index) => {
    const text = row.children[index]?.dataset.v ?? row.children[index]?.textContent.trim() ?? "";
    if (text === "") return null;
    const number = text === "inf" ? Infinity : Number(text.replace(/^≤ | ±.*$/g, ""));
    return Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });

  // Rows of a body stay in it: the oracle never moves among likelihoods. Empty cells come last in both directions.
  function sort(table, head, direction) {
    const index = [...head.parentNode.children].indexOf(head);
    for (const other of table.querySelectorAll("thead th[aria-sort]")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    for (const body of table.tBodies) {
      const rows = [...body.querySelectorAll(":scope > tr.row")].map((row) => ({ row, details: row.nextElementSibling, value: cellValue(row, index) }));
      rows.sort((a, b) => a.value === null || b.value === null ? (a.value === null) - (b.value === null) : sign * compare(a.value, b.value));
      for (const { row, details } of rows) body.append(row, ...(details?.classList.contains("details") ? [details] : []));
    }
  }

  for (const table of document.querySelectorAll("table.board")) {
    for (const button of table.querySelectorAll(":scope > thead button")) {
      button.disabled = false;
      button.addEventListener("click", () => {
        const head = button.closest("th");
        sort(table, head, head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending");
      });
    }
  }

  const board = document.getElementById("board");
  const controls = document.getElementById("controls");
  controls.hidden = false;
  controls.addEventListener("submit", (event) => event.preventDefault());
  for (const box of controls.querySelectorAll("[data-group]")) {
    box.addEventListener("change", () => board.classList.toggle(`no-${box.dataset.group}`, !box.checked));
  }

  const open = (row, wanted) => {
    row.nextElementSibling.hidden = !wanted;
    row.querySelector(".open").setAttribute("aria-expanded", String(wanted));
  };
  for (const row of board.querySelectorAll("tr.row")) {
    const button = row.querySelector(".open");
    button.hidden = false;
    row.classList.add("clickable");
    row.addEventListener("click", () => {
      if (getSelection().isCollapsed) open(row, row.nextElementSibling.hidden);
    });
  }

  const filters = ["model", "estimator", "cache"].map((name) => [name, document.getElementById(`filter-${name}`)]).filter(([, field]) => field);
  const count = document.getElementById("count");
  function filter() {
    const rows = [...board.querySelectorAll("tr.row")];
    let shown = 0;
    for (const row of rows) {
      const matches = filters.every(([name, field]) => {
        const wanted = field.value.trim();
        if (!wanted) return true;
        return name === "model" ? wanted.toLowerCase().split(/\s+/).every((word) => row.dataset.model.toLowerCase().includes(word)) : row.dataset[name] === wanted;
      });
      row.hidden = !matches;
      if (!matches) open(row, false);
      shown += matches;
    }
    for (const title of board.querySelectorAll("tr.title")) title.hidden = ![...title.parentNode.querySelectorAll("tr.row")].some((row) => !row.hidden);
    count.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`;
    document.getElementById("nothing").hidden = shown > 0;
  }
  for (const [, field] of filters) field.addEventListener("input", filter);
  filter();
})();
