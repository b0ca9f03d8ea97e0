"""The tags, attributes and texts of an HTML page, for tests of what a page contains."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "rect", "line", "polyline", "polygon", "br", "img"}


class Page(HTMLParser):
    """The tags, attributes and texts of a page; a tag that is not closed fails."""

    def __init__(self, content):
        super().__init__()
        self.open, self.tags, self.attributes, self.headings, self.texts = [], set(), [], [], []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())
