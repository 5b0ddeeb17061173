"""How the page of experts looks: light or dark as the reader's system is, wide or on a phone."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --faint: #6a6a6a; --line: #ddd;
  --heat: #b2182b; --there: #2166ac; --cell: #f5f3f2 }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e8e6e3; --faint: #9a9a9a;
  --line: #3a3d41; --heat: #ff7a5c; --there: #6db3f2; --cell: #212428 } }
body { background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif;
  max-width: 75em; margin: 0 auto; padding: 1em 1.5em 3em; overflow-wrap: anywhere }
h1 { font-size: 1.5em; margin: .5em 0 } h2 { font-size: 1.15em; margin: 2em 0 0 }
p { margin: .4em 0; color: var(--faint); max-width: 60em }
svg { display: block; width: 100%; background: var(--cell) }
path { fill: none; shape-rendering: crispEdges; stroke: var(--heat) }
.facts { display: flex; flex-wrap: wrap; gap: .6em 2.5em; margin: 1em 0 }
dt { color: var(--faint) } dd { margin: 0; font-size: 1.15em }
.chart { display: grid; grid-template-columns: 3.5em 1fr; margin-top: .8em }
.scale { display: flex; flex-direction: column; justify-content: space-between; margin: -.7em 0 }
.scale, .times, .ticks { color: var(--faint); font-size: .85em }
.plot svg { height: 7em; border: solid var(--line); border-width: 1px 0; box-sizing: border-box }
.grid { stroke: var(--line) } rect { fill: var(--there) }
.times { grid-column: 2; position: relative; height: 1.5em } .times span { position: absolute }
.wide { overflow-x: auto; margin-top: .4em } table { border-collapse: collapse; width: 100% }
th, td { padding: .3em 1.5em .3em 0; text-align: right; white-space: nowrap; font-weight: normal }
th:first-child { text-align: left; white-space: normal; overflow-wrap: break-word; max-width: 14em }
thead th { color: var(--faint) } thead th:last-child { text-align: left }
tbody tr { border-top: 1px solid var(--line) }
.strip { width: 40%; min-width: 8em; padding-right: 0 } .strip svg { height: 1.4em }
.legend span { display: inline-block; margin-right: 1em }
.legend b { display: inline-block; width: 1.2em; height: .8em; margin-right: .35em;
  background: var(--heat); outline: 1px solid var(--line) }
.legend b.h0 { background: var(--cell) }
.legend b.there { height: 2px; margin-bottom: .25em; background: var(--there); outline: 0 }
.tabs a { display: inline-block; color: var(--there); margin-left: .8em; text-decoration: none }
.tabs a[aria-current] { color: var(--ink); border-bottom: 2px solid var(--there) }
.layer { display: grid; grid-template-columns: 4.5em 1fr 4em 14em; gap: 0 1em;
  align-items: center; margin-top: 6px } .layer svg { height: 24px }
.layer path.there { stroke: var(--there); stroke-width: 2 }
.heads { color: var(--faint); margin-top: .8em } .rate { text-align: right }
.hot { font-size: .9em; white-space: nowrap } .ticks { display: flex }
.ticks i { flex: 1; font-style: normal; border-left: 1px solid var(--line); padding-left: .3em }
.h1 { opacity: .13 } .h2 { opacity: .3 } .h3 { opacity: .47 } .h4 { opacity: .64 }
.h5 { opacity: .82 }
@media (max-width: 45em) { body { padding: .5em 1em 2em } th, td { padding-right: .9em }
  .layer { grid-template-columns: auto auto 1fr; margin-top: 1em } .hot { text-align: right }
  .layer svg, .ticks { grid-column: 1 / 4; order: 1 } }
"""
