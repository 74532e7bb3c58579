"Writes README.md and its pictures from nbs/index.ipynb: prose as it is, shown code fenced, results below it"
import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIRECTIVE = re.compile(r"^#\|\s*([\w-]+):?[ \t]*(.*)$\n?", re.M)


def result(output, name):
    "One stored output as Markdown; a drawing becomes a file"
    data = output.get("data", {})
    if "image/svg+xml" in data:
        path = ROOT / "docs" / "images" / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        svg = "".join(data["image/svg+xml"])
        path.write_text(svg + "\n")
        return f"![{re.search('<title>(.*?)</title>', svg)[1]}](docs/images/{name}.svg)"
    if "text/markdown" in data: return "".join(data["text/markdown"])
    text = output.get("text") or data.get("text/plain") or ""
    return f"```\n{''.join(text).rstrip()}\n```"


def parts(nb):
    "README.md, piece by piece"
    for i, cell in enumerate(nb["cells"]):
        src = "".join(cell["source"])
        dirs = dict(DIRECTIVE.findall(src))
        if "hide" in dirs or "default_exp" in dirs: continue
        if cell["cell_type"] == "markdown": yield src
        else:
            if dirs.get("echo") != "false": yield f"```python\n{DIRECTIVE.sub('', src)}\n```"
            yield from (result(o, f"index-{i}") for o in cell["outputs"])


def readme():
    "The text of README.md"
    return "\n\n".join(parts(json.loads((ROOT / "nbs" / "index.ipynb").read_text()))) + "\n"


if __name__ == "__main__": (ROOT / "README.md").write_text(readme())
