document.querySelectorAll("table.sort").forEach(table => {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    const value = row => {
      const cell = row.cells[column], given = cell.dataset.v;
      return given === undefined ? cell.textContent.trim() : given === "" ? NaN : Number(given);
    };
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => {
        const x = value(a), y = value(b);
        if (typeof x === "string") return x.localeCompare(y, undefined, {numeric: true});
        return (isNaN(x) - isNaN(y)) || (down ? y - x : x - y);
      };
      const rows = [...body.rows].sort(order);
      body.append(...(down && typeof value(rows[0]) === "string" ? rows.reverse() : rows));
    });
  });
});
const open = () => {
  const found = location.hash && document.getElementById(location.hash.slice(1));
  if (found && found.tagName === "DETAILS") found.open = true;
};
addEventListener("hashchange", open);
open();
