"""For the API reference: the doctests of a docstring become code blocks."""

import re

from griffe import Extension


class Doctests(Extension):
    """Fences each run of lines that begins with `>>>` and ends before a blank line."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^( *)>>> .*?(?=\n\s*\n|\Z)",
                lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```",
                obj.docstring.value,
                flags=re.MULTILINE | re.DOTALL,
            )
