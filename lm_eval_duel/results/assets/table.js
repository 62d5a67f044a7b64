"use strict";
// Sorting, filtering, columns and details of the tables. Every text goes through textContent.
{
  // What a cell is sorted by: its number, else its text. The interval below a value does not count.
  function key(cell) {
    const text = cell.dataset.text ?? cell.firstChild?.textContent.trim() ?? "";
    if (text === "") return null;
    const number = text === "inf" || text === "whole target" ? Infinity : Number(text.replace(/^≤\s|\s±.*$|\s\[\d+\]$|,/g, "").replace("−", "-"));
    if (!Number.isNaN(number)) return number;
    return cell.matches(".number") && !/\d/.test(text) ? null : text; // such as "unclear"
  }
  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }

  // Rows of a body stay in it: the oracle never moves among likelihoods. Empty cells come last in both directions.
  function sort(table, head) {
    const index = [...head.parentNode.children].indexOf(head);
    const sign = head.ariaSort === "ascending" ? -1 : 1;
    for (const other of head.parentNode.children) other.ariaSort = null;
    head.ariaSort = sign === 1 ? "ascending" : "descending";
    for (const body of table.tBodies) {
      const found = [...body.querySelectorAll(":scope > .row")];
      const rows = found.map((row) => ({ row, details: row.nextElementSibling, key: key(row.children[index]) }));
      rows.sort((a, b) => (a.key === null) - (b.key === null) || sign * compare(a.key, b.key));
      for (const { row, details } of rows) body.append(row, ...(details?.matches(".details") ? [details] : []));
    }
  }
  for (const button of document.querySelectorAll(".board thead button")) {
    button.addEventListener("click", () => sort(button.closest("table"), button.closest("th")));
  }

  const board = document.getElementById("board");
  // In a table that scrolls only the first column stays: it then has the method, too.
  function nameRows() {
    board.classList.remove("scrolls");
    board.classList.toggle("scrolls", board.scrollWidth > board.parentElement.clientWidth);
  }
  addEventListener("resize", nameRows);
  const boxes = [...document.querySelectorAll("[data-group]")];
  // A remark is shown with the columns that refer to it.
  function showRemarks() {
    const hidden = boxes.filter((box) => !box.checked).map((box) => box.dataset.group);
    for (const remark of document.querySelectorAll("[data-groups]")) {
      remark.hidden = remark.dataset.groups.split(" ").every((group) => hidden.includes(group));
    }
  }
  for (const box of boxes) {
    const show = () => {
      for (const cell of board.querySelectorAll(`.g-${box.dataset.group}`)) cell.hidden = !box.checked;
      showRemarks();
      nameRows();
    };
    box.addEventListener("change", show);
    show();
  }

  const rows = [...board.querySelectorAll(".row")];
  function open(row, wanted) {
    row.nextElementSibling.hidden = !wanted;
    row.querySelector(".open").ariaExpanded = String(wanted);
  }
  board.addEventListener("click", ({ target }) => {
    const row = target.closest(".row");
    if (row && getSelection().isCollapsed) open(row, row.nextElementSibling.hidden);
  });

  const field = document.getElementById("filter");
  function filter() {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      if (row.hidden) open(row, false);
    }
    for (const body of board.tBodies) body.hidden = [...body.querySelectorAll(".row")].every((row) => row.hidden);
    document.getElementById("count").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  }
  field.addEventListener("input", filter);
  filter();
  nameRows();
}
