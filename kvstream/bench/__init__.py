"""The load generator behind ``kvstream bench``: a plan, its execution, and numbers that say what was measured.

``DESIGN.md`` tells what each number means. What decides is pure (plan, prompts, answer, figures, verdict); ``runner``
and ``target`` act; ``report``, ``files`` and ``plots`` show.
"""
