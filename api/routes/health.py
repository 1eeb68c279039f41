"""GET /health: the process lives. GET /ready: requests would be answered."""

import redis
from flask import Blueprint, Response

from api.routes.json import json_response
from api.services import Services
from shared.errors import RequestError


def health_routes(services: Services) -> Blueprint:
    """The endpoints for whoever starts, stops and balances."""
    routes = Blueprint("health", __name__)

    @routes.get("/health")
    def health() -> Response:
        return json_response({"status": "ok"})

    @routes.get("/ready")
    def ready() -> Response:
        missing = []
        models: list[str] = []
        if services.drain.has_begun():
            missing.append("this process is stopping")
        try:
            services.client.ping()
            models = sorted(services.fleet.models())
        except (redis.RedisError, RequestError):
            missing.append("Redis cannot be reached")
        else:
            if not models:
                missing.append("no worker serves a model")
        return json_response(
            {"ready": not missing, "models": models, "missing": missing}, status=503 if missing else 200
        )

    return routes
