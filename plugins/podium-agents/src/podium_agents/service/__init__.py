"""A model that answers conversations and texts, and records what it sampled. It speaks no HTTP: packages of the group
``podium.services`` do, and call it (see :mod:`podium_agents.services`).

service ──▶ token_source   requests of conversations, texts and ids ─▶ what draws ids
   ├──────▶ chat_format    messages ─▶ ids ─▶ messages
   └──────▶ sessions       calls ─▶ rows that train
"""
