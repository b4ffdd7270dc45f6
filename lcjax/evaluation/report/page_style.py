"""Looks of the pages: styles for light and dark, and the few lines that sort a table.

Pages hold everything they show: no font, script or picture is fetched.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --raised: #ffffff; --ink: #1c2126; --muted: #656d76; --grid: #e6e6e1;
  --rule: #d8d8d2; --accent: #0072b2; --tint: #0072b214; --mark: #b34a00; --wash: #f2f2ee;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #56b4e9; --c5: #e69f00;
  --c6: #333333;
  --text: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif;
  --serif: "Iowan Old Style", "Palatino Linotype", Palatino, "URW Palladio L", "P052", Charter,
    Georgia, serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181b; --raised: #1b1f23; --ink: #e4e6e8; --muted: #98a1aa; --grid: #2b3036;
    --rule: #353b42; --accent: #62b5ea; --tint: #62b5ea1f; --mark: #f0955a; --wash: #20252a;
    --c0: #4ba3dc; --c1: #f0813c; --c2: #2fbf95; --c3: #dd97bf; --c4: #8fd0f5; --c5: #f0b840;
    --c6: #c9ccd0;
  }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 3.5rem; -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 var(--text); font-variant-numeric: tabular-nums;
}
main { max-width: 66rem; margin: 0 auto; padding: 3rem 1.5rem 6rem; }
nav {
  position: sticky; top: 0; z-index: 2; background: var(--paper);
  border-bottom: 1px solid var(--rule);
}
nav ul {
  display: flex; gap: 1.4rem; max-width: 66rem; margin: 0 auto; padding: .7rem 1.5rem;
  list-style: none; overflow-x: auto; white-space: nowrap; font-size: .875rem;
}
nav a { color: var(--muted); text-decoration: none; }
nav a:hover { color: var(--accent); }
a { color: var(--accent); text-underline-offset: .15em; text-decoration-thickness: 1px; }
h1, h2 { font-family: var(--serif); font-weight: 600; line-height: 1.2; text-wrap: balance; }
h1 { font-size: 2.5rem; margin: .2rem 0 .8rem; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 1.65rem; margin: 0 0 .5rem; letter-spacing: -.01em; }
h3 { font-size: 1rem; margin: 2.2rem 0 .6rem; }
section { margin-top: 4rem; padding-top: 1.6rem; border-top: 1px solid var(--rule); }
.eyebrow {
  margin: 0; font-size: .75rem; font-weight: 600; letter-spacing: .1em; text-transform: uppercase;
  color: var(--muted);
}
.lead { max-width: 42rem; margin: 0; font-size: 1.125rem; color: var(--muted); }
.facts { display: flex; flex-wrap: wrap; gap: .4rem .5rem; margin: .2rem 0 1.4rem; padding: 0; }
.facts li {
  list-style: none; padding: .1rem .6rem; border-radius: 1rem; background: var(--wash);
  font-size: .8125rem; color: var(--muted);
}
.facts code, td code { font-size: .95em; }
code, pre, .said { font-family: var(--mono); font-size: .8125rem; }
.scroll { overflow-x: auto; margin: 0 0 .6rem; }
table { border-collapse: collapse; font-size: .9375rem; min-width: min(100%, 46rem); }
th, td { padding: .5rem .9rem; text-align: right; vertical-align: baseline; white-space: nowrap; }
th:first-child, td:first-child { padding-left: .25rem; text-align: left; }
thead th { font-size: .8125rem; font-weight: 600; color: var(--muted);
  border-bottom: 1.5px solid var(--ink); }
tbody tr { border-bottom: 1px solid var(--grid); }
tbody tr:last-child { border-bottom: 1.5px solid var(--ink); }
tbody tr:hover { background: var(--tint); }
td small { display: block; font-size: .71875rem; line-height: 1.3; color: var(--muted);
  font-weight: 400; }
td a { color: inherit; text-decoration-color: var(--rule); }
td a:hover { color: var(--accent); }
.best { font-weight: 700; }
.second { text-decoration: underline; text-underline-offset: .2em; }
.better { color: var(--c2); } .worse { color: var(--mark); }
td.words, th.words { text-align: left; white-space: normal; min-width: 12rem; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; max-width: 34rem; }
table.sort thead th { padding: 0; }
table.sort th button {
  all: unset; cursor: pointer; padding: .5rem .9rem; display: inline-block;
}
table.sort th:first-child button { padding-left: .25rem; }
table.sort th button:hover { color: var(--accent); }
table.sort th button:focus-visible { outline: 2px solid var(--accent); outline-offset: -2px; }
table.sort th[aria-sort] button::after { content: " \\2191"; }
table.sort th[aria-sort="descending"] button::after { content: " \\2193"; }
figure { margin: 2.2rem 0 0; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; max-width: min(52rem, var(--wide, 52rem));
  min-width: min(30rem, var(--wide, 30rem)); }
figure svg text { font-family: var(--text) !important; fill: var(--ink); }
figcaption, .note { max-width: 46rem; margin: .6rem 0 0; font-size: .875rem; color: var(--muted); }
details { margin: 1.2rem 0 0; }
.list details { margin: .15rem 0; } .list details[open] { margin: .6rem 0 1.4rem; }
summary { cursor: pointer; font-size: .9375rem; color: var(--muted); }
summary:hover { color: var(--accent); }
details:target > summary, tr:target { color: var(--accent); background: var(--tint); }
pre {
  overflow-x: auto; margin: .8rem 0 0; padding: 1rem 1.2rem; background: var(--wash);
  border-radius: .4rem; line-height: 1.5;
}
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.4rem; margin: 0;
  font-size: .9375rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { main { padding-top: 2rem; } h1 { font-size: 1.9rem; } }
@media print { nav { display: none; } section { break-inside: avoid-page; margin-top: 2rem; } }
"""

SCRIPT = """
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
"""
