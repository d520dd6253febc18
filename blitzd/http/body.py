"""Reading a request's body, with a bound on its size and on the time it takes."""

import asyncio

from aiohttp import web

from blitzd.http.errors import ApiError
from blitzd.http.limits import Limits


async def read_json_body(request: web.Request, limits: Limits) -> bytes:
    """The body of a request that says it is JSON, or does not say what it is.

    A form or plain text is what a browser can send to another origin without asking it,
    so those are refused. Raises ApiError (408, 413, 415).
    """
    if "Content-Type" in request.headers and request.content_type != "application/json":
        raise ApiError(
            415,
            f"Content-Type is {request.content_type}; accepted: application/json",
            code="unsupported_media_type",
            param="Content-Type",
        )
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ApiError(
            415,
            f"Content-Encoding is {encoding}; accepted: identity",
            code="unsupported_media_type",
            param="Content-Encoding",
        )
    if (request.content_length or 0) > limits.body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_s):
            return await request.read()
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {limits.body_s:g} s", code="request_timeout"
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(limits) from None
    except web.RequestPayloadError as failure:
        raise ApiError(400, f"the body is broken: {failure}", code="invalid_body") from failure


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        413, f"the body is too large; accepted: {limits.body_bytes} bytes", code="request_too_large"
    )
