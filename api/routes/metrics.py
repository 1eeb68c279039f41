"""GET /metrics: what Prometheus scrapes."""

from flask import Blueprint, Response
from prometheus_client import CONTENT_TYPE_LATEST

from api.services import Services


def metrics_routes(services: Services) -> Blueprint:
    """The endpoint for whoever measures."""
    routes = Blueprint("metrics", __name__)

    @routes.get("/metrics")
    def metrics() -> Response:
        return Response(services.scrape(), content_type=CONTENT_TYPE_LATEST)

    return routes
