"""The HTML of the pages, as jinja2 templates."""

_FRAME = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }} · lcjax</title>
<link rel="icon" href="data:,">
<style>{{ style | safe }}</style>
</head>
<body>
<nav aria-label="Sections"><ul>
{% block nav %}{% endblock %}
</ul></nav>
<main>
<header>
<p class="eyebrow">{{ eyebrow }}</p>
<h1>{{ title }}</h1>
<p class="lead">{{ lead }}</p>
</header>
{% block body %}{% endblock %}
</main>
<script>{{ script | safe }}</script>
</body>
</html>
"""

_PARTS = """\
{% macro number(entry) -%}
<td data-v="{{ '' if entry.value is none else entry.value }}">
{%- if entry.place %}<span class="{{ entry.place }}">{% endif -%}
{%- if entry.link %}<a href="#{{ entry.link }}">{{ entry.text }}</a>{% else %}{{ entry.text }}
{%- endif %}{% if entry.place %}</span>{% endif %}
{%- if entry.note %}<small>{{ entry.note }}</small>{% endif %}</td>
{%- endmacro %}

{% macro grid(table) %}
<div class="scroll"><table class="sort">
<thead><tr><th scope="col">method</th>
{% for length in table.lengths %}<th scope="col">{{ length | count }}</th>{% endfor %}
</tr></thead>
<tbody>
{% for method, row in table.rows.items() %}
<tr><td>{{ method }}</td>{% for entry in row %}{{ number(entry) }}{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}

{% macro drawn(figures) %}
{% for figure in figures %}
<figure>{{ figure.svg | safe }}<figcaption>{{ figure.caption }}</figcaption></figure>
{% endfor %}
{% endmacro %}

{% macro shown(examples) %}
{% if examples.groups %}
<h3>{{ examples.title }}</h3>
<div class="list">
{% for group in examples.groups %}
<details id="{{ group.anchor }}">
<summary>{{ group.method }}, {{ group.length | count }} tokens: {{ group.count }} of
{{ group.of }}{% if group.rows | length < group.count %}, here {{ group.rows | length }}{% endif %}
</summary>
<div class="scroll"><table class="sort">
<thead><tr>{% for head in examples.heads %}<th scope="col">{{ head | replace("_", " ") }}</th>
{%- endfor %}{% if group.rows[0].answer is not none %}<th scope="col" class="words">expected</th>
<th scope="col" class="words">answer</th><th scope="col">score</th>
{%- else %}<th scope="col">loss, nats a token</th>{% endif %}</tr></thead>
<tbody>
{% for row in group.rows %}
<tr>{% for fact in row.facts %}<td>{{ fact }}</td>{% endfor %}
{% if row.answer is not none %}
<td class="words"><span class="said">{{ row.expected | join("\n") }}</span></td>
<td class="words"><span class="said">{{ row.answer }}</span></td>
{%- endif %}
<td data-v="{{ '' if row.value is none else row.value }}">{{ row.score }}</td></tr>
{% endfor %}
</tbody></table></div>
</details>
{% endfor %}
</div>
{% endif %}
{% if examples.prompt %}
<details><summary>One prompt as the model reads it</summary>
<pre class="said">{{ examples.prompt }}</pre></details>
{% endif %}
{% endmacro %}

{% macro paired(differences) %}
{% if differences.rows %}
<h3>Paired differences</h3>
<div class="scroll"><table class="sort"><thead><tr><th scope="col">first against second</th>
{% for length in differences.lengths %}<th scope="col">{{ length | count }}</th>{% endfor %}
</tr></thead><tbody>
{% for name, row in differences.rows.items() %}
<tr><td>{{ name[0] }}<small>against {{ name[1] }}
{{- ", " if name[2] }}{{ name[2] }}</small></td>
{% for found in row %}
{% if found is none %}<td data-v=""></td>
{% else %}<td data-v="{{ found.mean }}">
{%- if found.kind %}<span class="{{ found.kind }}">{{ found.text }}</span>
{%- else %}{{ found.text }}{% endif %}<small>{{ found.note }}</small></td>
{% endif %}
{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
<p class="note">{{ differences.unit }}, over the examples that both rows have answered. Below: the
95 % interval of a paired bootstrap, and the number of examples.
* p &lt; 0.05, ** p &lt; 0.01, not corrected for the number of comparisons.</p>
{% endif %}
{% endmacro %}

{% macro task_head(task) %}
<p class="eyebrow">{{ task.label }}</p>
<h2>{{ task.title }}</h2>
<ul class="facts"><li>protocol <code>{{ task.protocol }}</code></li><li>{{ task.arrow }}</li>
{% for fact in task.facts %}<li>{{ fact }}</li>{% endfor %}</ul>
{% endmacro %}
"""

_RUN = """\
{% extends "frame" %}
{% from "parts" import number, grid, drawn, shown, paired, task_head %}
{% block nav %}
{% if overview %}<li><a href="#overview">Overview</a></li>{% endif %}
{% for task in tasks %}<li><a href="#{{ task.anchor }}">{{ task.label }}</a></li>{% endfor %}
<li><a href="#cost">Cost</a></li><li><a href="#run">What was run</a></li>
{% endblock %}
{% block body %}
{% if overview %}
<section id="overview">
<h2>At {{ overview.length | count }} tokens</h2>
<div class="scroll"><table class="sort">
<thead><tr><th scope="col">method</th>
{% for head in overview.heads %}<th scope="col" title="{{ head.arrow }}">{{ head.label }}</th>
{% endfor %}</tr></thead>
<tbody>
{% for method, row in overview.rows.items() %}
<tr><td>{{ method }}</td>{% for entry in row %}{{ number(entry) }}{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
<p class="note">The longest context of the run; the best of a column is bold, the second of three or
more underlined.
{% for head in overview.heads %}<a href="#{{ head.anchor }}">{{ head.label }}</a>: {{ head.arrow }}
{{- "." if loop.last else "; " }}{% endfor %}</p>
{{ drawn(figures) }}
</section>
{% endif %}
{% for task in tasks %}
<section id="{{ task.anchor }}">
{{ task_head(task) }}
{{ grid(task.table) }}
<p class="note">Columns are context lengths in tokens, everything counted. The best of a column is
bold, the second of three or more underlined.
{% if task.table.intervals %}Below a number: its 95 % interval. {% endif %}
{% if task.table.links %}A linked number leads to {{ task.examples.title | lower }}.{% endif %}
{% if task.bits %}Tokenizers differ: compare bits per byte, in <code>summary.json</code>.{% endif %}
</p>
{% if task.aggregates %}
<h3>{{ task.aggregates.title }}</h3>
<div class="scroll"><table class="sort"><thead><tr><th scope="col">method</th>
{% for head in task.aggregates.heads %}<th scope="col">{{ head | replace("_", " ") }}</th>
{% endfor %}</tr></thead><tbody>
{% for method, row in task.aggregates.rows.items() %}
<tr><td>{{ method }}</td>{% for text in row %}<td>{{ text }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endif %}
{{ paired(task.differences) }}
{{ drawn(task.figures) }}
{{ shown(task.examples) }}
</section>
{% endfor %}
<section id="cost">
<h2>What it cost</h2>
{{ drawn(cost.figures) }}
<details><summary>Numbers</summary>
<div class="scroll"><table class="sort">
<thead><tr><th scope="col">method</th><th scope="col">length</th><th scope="col">tokens/s</th>
<th scope="col">peak, GB</th><th scope="col">seconds</th><th scope="col">compiling</th></tr></thead>
<tbody>
{% for row in cost.rows %}
<tr><td>{{ row.method }}</td><td data-v="{{ row.length }}">{{ row.length | count }}</td>
<td data-v="{{ row.speed or '' }}">{{ "{:,.0f}".format(row.speed) if row.speed else "?" }}</td>
<td data-v="{{ row.peak or '' }}">{% if row.peak %}{{ "≤ " if row.bound }}
{{- "{:,.2f}".format(row.peak / 1e9) }}{% else %}?{% endif %}</td>
<td data-v="{{ row.seconds }}">{{ "{:,.1f}".format(row.seconds) }}</td>
<td data-v="{{ row.compile_seconds }}">{{ "{:,.1f}".format(row.compile_seconds) }}</td></tr>
{% endfor %}
</tbody></table></div>
{% if cost.rows | selectattr("bound") | list %}
<p class="note">≤: the allocator keeps one peak per process, which an earlier cell had set.</p>
{% endif %}
</details>
</section>
<section id="run">
<h2>What was run</h2>
<dl>{% for name, text in facts %}<dt>{{ name }}</dt><dd>{{ text }}</dd>{% endfor %}</dl>
{% if notes %}
<h3>Trained first</h3>
<div class="scroll"><table class="sort"><thead><tr>
{% for head in notes[0] %}<th scope="col">{{ head }}</th>{% endfor %}</tr></thead><tbody>
{% for row in notes[1:] %}<tr>{% for text in row %}<td>{{ text }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endif %}
<details><summary>The whole config</summary><pre>{{ config }}</pre></details>
<p class="note">Every number here is made from the lines in <code>records/</code>;
<code>tables/</code> holds them as CSV, Markdown and LaTeX, <code>figures/</code> as PNG and
SVG.</p>
</section>
{% endblock %}
"""

_COMPARE = """\
{% extends "frame" %}
{% from "parts" import number, grid, drawn, paired, task_head %}
{% block nav %}
<li><a href="#runs">Runs</a></li>
{% for task in tasks %}<li><a href="#{{ task.anchor }}">{{ task.label }}</a></li>{% endfor %}
{% endblock %}
{% block body %}
<section id="runs">
<h2>{{ "The runs" if runs | length > 1 else "The run" }}</h2>
<div class="scroll"><table><thead><tr><th scope="col">run</th><th scope="col">examples</th>
<th scope="col">settings' hash</th></tr></thead><tbody>
{% for run in runs %}
<tr><td>{{ run.name }}</td><td>{{ run.examples | count }}</td><td><code>{{ run.hash }}</code></td>
</tr>
{% endfor %}
</tbody></table></div>
{% if changed %}
<h3>Settings that differ</h3>
<div class="scroll"><table class="sort"><thead><tr><th scope="col">key</th>
{% for run in runs %}<th scope="col" class="words">{{ run.name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for key, values in changed.items() %}
<tr><td><code>{{ key }}</code></td>
{% for value in values %}<td class="words"><span class="said">{{ value }}</span></td>{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
{% elif runs | length > 1 %}
<p class="note">All settings that decide a number are the same.</p>{% endif %}
</section>
{% for task in tasks %}
<section id="{{ task.anchor }}">
{{ task_head(task) }}
{{ grid(task.table) }}
<p class="note">Columns are context lengths in tokens. The best of a column is bold, the second of
three or more underlined.{% if task.table.intervals %} Below a number: its 95 % interval.{% endif %}
</p>
{{ paired(task.differences) }}
{{ drawn(task.figures) }}
</section>
{% endfor %}
{% endblock %}
"""

TEMPLATES = {"frame": _FRAME, "parts": _PARTS, "run": _RUN, "compare": _COMPARE}
