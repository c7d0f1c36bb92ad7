"""Where Podium's published figures come from: one command, the same run, floors and peers side by side."""
