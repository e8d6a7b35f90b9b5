"""The least a gateway can be with the same libraries: a quart-trio route that passes bytes through httpx. No queue, no
parsing, no accounting. The reference for what KVStream adds.

    python bare_proxy.py PORT BACKEND_URL
"""

import sys

import httpx
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from quart import request
from quart_trio import QuartTrio

port, backend = int(sys.argv[1]), sys.argv[2]
app = QuartTrio(__name__)
client = httpx.AsyncClient(timeout=None, trust_env=False)


@app.post("/v1/chat/completions")
async def chat():
    body = await request.get_data()

    async def chunks():
        upstream = client.stream("POST", backend + "/v1/chat/completions", content=body,
                                 headers={"content-type": "application/json"})
        async with upstream as response:
            async for chunk in response.aiter_raw():
                yield chunk

    return chunks(), 200, {"content-type": "text/event-stream"}


config = Config()
config.bind = [f"127.0.0.1:{port}"]
config.loglevel = "ERROR"
trio.run(serve, app, config)
