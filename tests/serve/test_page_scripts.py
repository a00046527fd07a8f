"""The page's reader of Markdown, and its trees of messages, run by node if that is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.browser.xss import ELEMENTS, numbered

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")
WEB = Path(str(files("archerfish.serve") / "web"))
SHOWN = """
import {readFileSync} from "node:fs";
import {parse} from "./markdown.js";
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const html = (node) => {
  if (typeof node === "string") return escaped(node);
  const {tag, children, isClosed, ...others} = node;
  const given = Object.entries(others).filter(([, value]) => value !== "" && value !== undefined);
  const told = given.map(([name, value]) => ` ${name}="${value}"`);
  return `<${tag}${told.join("")}>${children.map(html).join("")}</${tag}>`;
};
const walk = (node) => (typeof node === "string" ? [] : [[node.tag, node.href ?? null], ...node.children.flatMap(walk)]);
const whole = (text) => parse(text).map(({node}) => JSON.stringify(node));
const isSteady = (text) => {  // what comes before the last block stays, and the last block can be read by itself
  for (let length = 1; length < text.length; length++) {
    const blocks = parse(text.slice(0, length)), next = whole(text.slice(0, length + 1));
    const last = blocks.at(-1)?.offset ?? 0;
    const kept = blocks.slice(0, -1).map(({node}) => JSON.stringify(node));
    const again = [...kept, ...whole(text.slice(last, length + 1))];
    if (JSON.stringify(again) !== JSON.stringify(next)) return text.slice(0, length + 1);
  }
  return true;
};
const texts = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(texts.map((text) => {
  const began = performance.now(), blocks = parse(text), seconds = (performance.now() - began) / 1000;
  return {html: blocks.map(({node}) => html(node)).join(""), tags: blocks.flatMap(({node}) => walk(node)),
    steady: text.length < 300 ? isSteady(text) : true, seconds};
})));
"""
CASES = (
    ("plain", "<p>plain</p>"),
    ("two\nlines", "<p>two<br></br>lines</p>"),
    ("hard  \nbreak\\\nagain", "<p>hard<br></br>break<br></br>again</p>"),
    ("one\n\ntwo", "<p>one</p><p>two</p>"),
    ("# One #\n###### Six\n####### no", "<h1>One</h1><h6>Six</h6><p>####### no</p>"),
    ("## a ## \n# b#\n# c \\#\n# #\n#", "<h2>a</h2><h1>b#</h1><h1>c #</h1><h1></h1><h1></h1>"),
    ("#no\nA\n===\nB\n---", "<h1>#no<br></br>A</h1><h2>B</h2>"),
    ("---\n***\n_ _ _", "<hr></hr><hr></hr><hr></hr>"),
    (
        "*em* _em_ **st** __st__ ***both*** ~~del~~",
        "<p><em>em</em> <em>em</em> <strong>st</strong> <strong>st</strong> <em><strong>both</strong></em> "
        "<del>del</del></p>",
    ),
    ("snake_case_name 2 * 3 * 4 **", "<p>snake_case_name 2 * 3 * 4 **</p>"),
    ("**a *b* c** *a **b** c*", "<p><strong>a <em>b</em> c</strong> <em>a <strong>b</strong> c</em></p>"),
    ("**open and *half", "<p>**open and *half</p>"),
    (r"\*no\* \\ \a 2\. x", r"<p>*no* \ \a 2. x</p>"),
    ("`a*b*` ``a`b`` ` `` ` `open", "<p><code>a*b*</code> <code>a`b</code> <code>``</code> `open</p>"),
    (
        '[t](https://a.b/c?d=e "title") [x](mailto:a@b.c)',
        '<p><a href="https://a.b/c?d=e">t</a> <a href="mailto:a@b.c">x</a></p>',
    ),
    (
        "[*t*](http://a.b/(c)) [no](ftp://a.b) [no]",
        '<p><a href="http://a.b/(c)"><em>t</em></a> <span>no</span> [no]</p>',
    ),
    ("![alt](https://a.b/c.png)", '<p><a href="https://a.b/c.png">alt</a></p>'),
    (
        "See https://a.b/c_d_e), <https://f.g>.",
        '<p>See <a href="https://a.b/c_d_e">https://a.b/c_d_e</a>), <a href="https://f.g/">https://f.g</a>.</p>',
    ),
    ("a <b>x</b> &amp; &lt;i&gt; &copy;", "<p>a &lt;b&gt;x&lt;/b&gt; &amp; &lt;i&gt; &amp;copy;</p>"),
    ("```py\nx = 1\n\n  y\n```\nafter", '<pre lang="py">x = 1\n\n  y</pre><p>after</p>'),
    ("~~~\n```\n~~~", "<pre>```</pre>"),
    ("```\nopen", "<pre>open</pre>"),
    ("    code\n\n    more\n\ntext", "<pre>code\n\nmore</pre><p>text</p>"),
    ("- a\n- b\n  - c\n    - d\n- e", "<ul><li>a</li><li>b<ul><li>c<ul><li>d</li></ul></li></ul></li><li>e</li></ul>"),
    ("1. a\n2. b\n   ```\n   x\n   ```\n3. c", '<ol start="1"><li>a</li><li>b<pre>x</pre></li><li>c</li></ol>'),
    ("3) a\n4) b\n- c", '<ol start="3"><li>a</li><li>b</li></ol><ul><li>c</li></ul>'),
    ("- a\n\n  more\n\n- b", "<ul><li><p>a</p><p>more</p></li><li><p>b</p></li></ul>"),
    (
        "1. **a**:\n  - x\n  - y\n2. b",
        '<ol start="1"><li><strong>a</strong>:<ul><li>x</li><li>y</li></ul></li><li>b</li></ol>',
    ),
    ("- [ ] open\n- [x] done", "<ul><li>\u2610 open</li><li>\u2611 done</li></ul>"),
    ("text\n- list\n\nafter", "<p>text</p><ul><li>list</li></ul><p>after</p>"),
    ("In 1999\n1999. was no list", "<p>In 1999<br></br>1999. was no list</p>"),
    ("> a\n> > b\n>\n> c", "<blockquote><p>a</p><blockquote><p>b</p></blockquote><p>c</p></blockquote>"),
    ("> - a\nlazy\n\nout", "<blockquote><ul><li>a<br></br>lazy</li></ul></blockquote><p>out</p>"),
    (
        "| a | b |\n|:--|--:|\n| 1 | `x|y` |\n| 2 |\n\nout",
        '<table><thead><tr><th align="left">a</th><th align="right">b</th></tr></thead><tbody><tr><td align="left">1</td>'
        '<td align="right"><code>x|y</code></td></tr><tr><td align="left">2</td><td align="right"></td></tr>'
        "</tbody></table><p>out</p>",
    ),
    (
        "text\na|b\n-|-\n1\\|2|3",
        "<p>text</p><table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>1|2</td><td>3</td></tr></tbody></table>",
    ),
    ("a | b\nno table", "<p>a | b<br></br>no table</p>"),
    ("\u4e2d\u6587**\u7c97\u4f53**\u3002", "<p>\u4e2d\u6587<strong>\u7c97\u4f53</strong>\u3002</p>"),
    ("a\r\nb", "<p>a<br></br>b</p>"),
    ("", ""),
    ("\n \n", ""),
)
GAP = " " * 100_000
WIDE_TABLE = "|" + "a|" * 3_000 + "\n|" + "-|" * 3_000 + "\n|" * 3_000
LARGE = (
    "*a " * 20_000,
    "[" * 20_000,
    "[a](" * 8_000,
    "`" * 3 + "a``b" * 8_000,
    "> " * 5_000 + "x",
    "*_" * 10_000,
    "- " * 3_000 + "x",
    "~~a" * 9_000,
    "<" * 20_000,
    f"# a{GAP}b",
    f"#{GAP}\u2028b",
    f"# {'#' * 20_000}b",
    f"`{GAP}a{GAP}\n`",
    f"`{GAP}`",
    f"a{GAP}b\nc",
    f"```{GAP}`",
    "~" * 50_000 + "`",
    f"a|b\n-|-{GAP}b",
    f"*{GAP}b",
    f"-{GAP}b",
    f"a\n-{GAP}b",
    f"[a]({GAP}b",
    f'[a](b{GAP}"{GAP}',
    f"https://a{'.' * 20_000}b",
    f"https://a{')' * 20_000}",
    WIDE_TABLE,
)


def run_module(source: str, given: Any, tmp_path: Path) -> Any:
    for path in WEB.glob("*.js"):
        shutil.copy(path, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "test.js").write_text(source)
    words = [str(NODE), str(tmp_path / "test.js")]
    done = subprocess.run(words, input=json.dumps(given), capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_markdown(tmp_path: Path) -> None:
    """A table of texts; and each of them grows letter by letter, as an answer does."""
    found = run_module(SHOWN, [text for text, _ in CASES], tmp_path)
    for (text, expected), shown in zip(CASES, found, strict=True):
        assert shown["html"] == expected, text
        assert shown["steady"] is True, text


def test_model_output_is_never_html(tmp_path: Path) -> None:
    """Red: an element that Markdown does not have, or a link that is not http, https or mailto."""
    texts = numbered()
    assert len(texts) > 40
    for text, shown in zip(texts, run_module(SHOWN, texts, tmp_path), strict=True):
        for tag, href in shown["tags"]:
            assert tag in ELEMENTS, text
            assert href is None or re.match(r"(https?://[\w.]|mailto:)", href), (text, href)
        assert shown["steady"] is True, text


def test_long_texts_are_read_in_linear_time(tmp_path: Path) -> None:
    """Red: a reader that takes time with the square of its text; the limit is some fifty times what these take."""
    for text, shown in zip(LARGE, run_module(SHOWN, LARGE, tmp_path), strict=True):
        assert shown["seconds"] < 5, text[:20]


TREES = """
import {addNode, exportText, importText, newConversation, pathOf, pathTo, pick, siblingsOf} from "./conversations.js";
const made = newConversation({model: "m"});
const add = (parent, role, content) => addNode(made, parent, {role, content});
const ask = add(null, "user", "One"), first = add(ask.id, "assistant", "1"), second = add(ask.id, "assistant", "2");
const next = add(second.id, "user", "More"), edited = add(null, "user", "Uno");
const shown = () => pathOf(made).map(({content}) => content);
const paths = [shown()];
pick(made, ask); paths.push(shown());
pick(made, first); paths.push(shown());
pick(made, second); paths.push(shown());
Object.assign(first, {
  model: "m", reasoning: "Hm", calls: [{id: "c", name: "f", text: "{}"}], usage: {prompt: 1, output: 2, cached: 0},
  tokens: [{bytes: [49], logprob: -0.1, top: [["1", -0.1]]}], error: {message: "No", hint: "", status: 500},
  firstMs: 1.5, totalMs: 2, remark: "r", isStopped: true, finish: "stop", isJson: false,
});
const tools = {isOn: false, text: "[]", choice: ""};
Object.assign(made.settings, {params: {stop: ["a"]}, system: "s", format: {isOn: true, text: "{}"}, tools});
const text = exportText([made]), [again] = importText(text, []), [copy] = importText(text, [made.id]);
const broken = [text.replace(ask.id, "gone"), text.replace('"role": "user"', '"role": "system"')];
const changed = (change) => {
  const data = JSON.parse(text), [one] = data.conversations;
  change(one, one.nodes[first.id]);
  return JSON.stringify(data);
};
const WRONG = {
  calls: ["x", [null], [{id: "c", name: "f"}]], error: ["No", {message: {}}], reasoning: [1], parent: [0], firstMs: ["1"],
  tokens: [{}, [{bytes: "1", logprob: 0, top: []}], [{bytes: [], logprob: 0, top: [["1"]]}]], usage: [5, {}],
  remark: [{}], content: [null],
};
const SETTINGS = [{system: 1}, {params: "x"}, {format: true}, {tools: {isOn: true}}, []];
const wrong = [
  ...Object.entries(WRONG).flatMap(([name, values]) => values.map((value) => changed((_, node) => { node[name] = value; }))),
  ...SETTINGS.map((settings) => changed((one) => { one.settings = settings; })),
  ...[["title", {}], ["picked", "x"], ["nodes", []]].map(([name, value]) => changed((one) => { one[name] = value; })),
];
const [known] = importText(changed((one, node) => {
  for (const each of [one, node, one.settings, node.calls[0]]) each.more = 1;
}), []);
const refused = ["{", "{}", ...broken, ...wrong].map((one) => {
  try { importText(one, []); return "taken"; } catch (error) { return error.message; }
});
console.log(JSON.stringify({paths, title: made.title, siblings: siblingsOf(made, second).map(({content}) => content),
  to: pathTo(made, next.id).map(({content}) => content),
  isSame: exportText([again]) === text, isKnown: exportText([known]) === text, isCopy: copy.id !== made.id, refused}));
"""


def test_trees_of_messages(tmp_path: Path) -> None:
    found = run_module(TREES, None, tmp_path)
    assert found["paths"] == [["Uno"], ["One", "2", "More"], ["One", "1"], ["One", "2", "More"]]
    assert (found["title"], found["siblings"], found["to"]) == ("Uno", ["1", "2"], ["One", "2", "More"])
    assert found["isSame"] and found["isCopy"] and found["isKnown"]
    assert found["refused"][0] == "The file is not JSON." and "no conversations" in found["refused"][1]
    assert len(found["refused"]) == 27 and set(found["refused"][2:]) == {
        "The file has a conversation that is not whole."
    }
