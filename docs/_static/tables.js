// Long tables: a field that filters the rows, and headings that sort them.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table")) {
    const body = table.tBodies[0], rows = body ? [...body.rows] : [];
    if (rows.length < 15 || !table.tHead) continue;
    const field = document.createElement("input"), label = document.createElement("label"), says = document.createElement("span");
    Object.assign(field, { type: "search" });
    label.className = "filter";
    says.setAttribute("role", "status");
    label.append("Rows with ", field, says);
    (table.closest(".pst-scrollable-table-container") || table).before(label);
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every(w => row.textContent.toLowerCase().includes(w));
      says.textContent = words.length ? ` ${rows.filter(row => !row.hidden).length} of ${rows.length}` : "";
    });
    [...table.tHead.rows[0].cells].forEach((head, i) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending", said = row => row.cells[i].textContent.trim();
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        body.append(...rows.toSorted((a, b) => (up ? 1 : -1) * said(a).localeCompare(said(b), "en", { numeric: true })));
      });
    });
  }
});
