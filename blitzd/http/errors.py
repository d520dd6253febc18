"""OpenAI's error object, for every error of every route."""

import logging
from http import HTTPStatus

import msgspec
from aiohttp import web

from blitzd.node.face import CommandFailed, GenerationFailed, RequestRefused

log = logging.getLogger(__name__)


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(msgspec.Struct):
    """`{"error": {...}}`: the body of an error, and the last frame of a broken stream."""

    error: ErrorBody


class ApiError(Exception):
    """Ends a request with `status` and an error object.

    `param` names the offending field in the notation `messages[0].content`; `code` is a
    stable word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        # A header that is echoed may hold bytes that are no UTF-8; the answer must not.
        super().__init__(message.encode(errors="replace").decode())
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> ErrorObject:
        return ErrorObject(ErrorBody(str(self), _type_of(self.status), self.param, self.code))

    def response(self) -> web.Response:
        return web.Response(
            body=msgspec.json.encode(self.body()),
            status=self.status,
            content_type="application/json",
            headers=self.headers,
        )


def _type_of(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def bad_request(message: str, *, param: str | None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def as_api_error(failure: Exception) -> ApiError:
    """What the client is told of `failure`. A defect of ours is logged and becomes a 500."""
    match failure:
        case ApiError():
            return failure
        case RequestRefused():
            retry = {"Retry-After": str(failure.retry_after_s)}
            return ApiError(failure.status, str(failure), code=failure.code, headers=retry)
        case CommandFailed():
            return ApiError(failure.status, str(failure), code=failure.code, param=failure.param)
        case GenerationFailed():
            retry = {"Retry-After": "1"}
            message = f"the generation failed: {failure}"
            return ApiError(503, message, code=failure.code, headers=retry)
        case web.HTTPException():
            return _of_aiohttp(failure)
    log.error("unexpected failure while answering a request", exc_info=failure)
    return ApiError(500, "internal error; the daemon's log has the details", code="internal_error")


def _of_aiohttp(failure: web.HTTPException) -> ApiError:
    match failure:
        case web.HTTPNotFound():
            return ApiError(404, "no such route", code="unknown_route")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(failure.allowed_methods))
            message = f"{failure.method} is not allowed here; allowed: {allowed}"
            headers = {"Allow": allowed}
            return ApiError(405, message, code="method_not_allowed", headers=headers)
        case web.HTTPExpectationFailed():
            message = f"{failure.text}; accepted: 100-continue"
            return ApiError(417, message, code="expectation_failed", param="Expect")
    reason = failure.reason.lower()
    return ApiError(failure.status, reason, code=reason.replace(" ", "_"))
