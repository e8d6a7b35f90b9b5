"""Every route that KVStream knows, as data: one row each. What a backend serves of them is ``Capabilities.routes``.

A row names the *form* of its bodies (who reads the prompt, decodes the stream and assembles the answer go by it;
several paths share one), what limits an answer, and how a call is let in:

* ``SEAT``: it makes the runtime compute over a prompt, so it is queued and holds a seat and pages until it ends.
* ``LIGHT``: it reads no KV memory (tokenizing, counting, rendering). It is passed on at once, a few at a time.
* ``MEDIA``: a body of many parts is passed on as it comes, its size no measure of its cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen

SEAT, LIGHT, MEDIA = "seat", "light", "media"

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"


@frozen
class Route:
    """One route.

    ``form``: ``chat``, ``completions``, ``messages``, ``responses``, ``native`` (llama.cpp's ``/completion``),
    ``infill``, ``embeddings``, ``native_embeddings``, ``rerank``, ``tokens`` (the light ones), ``audio``, and Ollama's
    own ``ollama_chat``, ``ollama_generate``, ``ollama_embed``.
    ``dialect``: in which words errors and frames of our own are said: ``openai``, ``anthropic``, ``responses``,
    ``llamacpp``, ``ollama``. ``limits``: the fields (a dot goes into an object) that bound the answer; the first is the
    one to set, and where several are given the last counts. None where there are no answer tokens. ``streams``: it can
    answer with a stream, whose end is ``end``: an event's name, ``[DONE]`` or a field. ``stream_default``: what it does
    when the client does not say. ``usage``: where the stream tells token counts.
    """

    path: str
    form: str
    dialect: str = "openai"
    limits: tuple[str, ...] = ()
    streams: bool = False
    stream_default: bool = False
    end: str = ""
    usage: str = ""
    access: str = SEAT

    @property
    def generates(self) -> bool:
        """Whether the answer is made of tokens. Embeddings and rankings only read."""
        return bool(self.limits)

    @property
    def lists(self) -> bool:
        """Whether an answer in one piece may be a list: where several prompts or texts were sent."""
        return self.form in _LISTS

    @property
    def usage_on_request(self) -> bool:
        """Whether a stream tells token counts only to those who ask (``stream_options``)."""
        return self.usage == "chunk"


_LISTS = frozenset(("native", "infill", "native_embeddings", "rerank"))
_MAX = ("max_tokens", "max_completion_tokens")
_NATIVE = ("max_tokens", "n_predict")

_ROWS = (
    *(Route(p, "chat", limits=_MAX, streams=True, end="[DONE]", usage="chunk") for p in (CHAT, "/chat/completions")),
    Route(COMPLETIONS, "completions", limits=("max_tokens",), streams=True, end="[DONE]", usage="chunk"),
    Route(MESSAGES, "messages", "anthropic", ("max_tokens",), streams=True, end="message_stop", usage="message_delta"),
    *(Route(p, "responses", "responses", ("max_output_tokens",), streams=True, end="response.completed",
            usage="response.completed") for p in (RESPONSES, "/responses")),
    *(Route(p, "native", "llamacpp", _NATIVE, streams=True, end="stop", usage="stop")
      for p in ("/completion", "/completions")),
    Route("/infill", "infill", "llamacpp", _NATIVE, streams=True, end="stop", usage="stop"),
    Route(EMBEDDINGS, "embeddings"),
    *(Route(p, "native_embeddings", "llamacpp") for p in ("/embedding", "/embeddings")),
    *(Route(p, "rerank") for p in ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")),
    Route("/v1/messages/count_tokens", "tokens", "anthropic", access=LIGHT),
    *(Route(p, "tokens", access=LIGHT) for p in (
        "/v1/chat/completions/input_tokens", "/chat/completions/input_tokens", "/v1/responses/input_tokens",
        "/responses/input_tokens")),
    *(Route(p, "tokens", "llamacpp", access=LIGHT) for p in ("/tokenize", "/detokenize", "/apply-template")),
    *(Route(p, form, "ollama", ("options.num_predict",), streams=True, stream_default=True, end="done", usage="done")
      for p, form in (("/api/chat", "ollama_chat"), ("/api/generate", "ollama_generate"))),
    *(Route(p, "ollama_embed", "ollama") for p in ("/api/embed", "/api/embeddings")),
    *(Route(p, "audio", access=MEDIA) for p in ("/v1/audio/transcriptions", "/v1/audio/translations")),
)

ROUTES: Mapping[str, Route] = MappingProxyType({row.path: row for row in _ROWS})

OLLAMA_ROUTES = frozenset(path for path, row in ROUTES.items() if row.dialect == "ollama") | {
    CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, "/v1/audio/transcriptions"}
"""Ollama's own, and what it serves of the others."""

OPENAI_ROUTES = frozenset(path for path in ROUTES if path.startswith("/v1/"))
"""What a server that calls itself OpenAI-compatible may serve; what it does not, it says with a 404."""

LLAMACPP_ROUTES = frozenset(
    path for path, row in ROUTES.items() if row.dialect != "ollama" and path != "/v1/audio/translations")
"""``llama-server`` serves all of them; some only with a flag, and then says which."""


def route_of(path: str) -> Route:
    """The row of a path. A path that is in no row is taken for a chat: only tests and programs ask for such."""
    return ROUTES.get(path, ROUTES[CHAT])
