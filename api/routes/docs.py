"""GET /openapi.json: the description of the API. GET /docs: the same as a page, with nothing from elsewhere in it."""

from importlib.resources import files
from pathlib import Path

import msgspec
from flask import Blueprint, Response

from api.openapi.document import document
from api.security import CONTENT_SECURITY_POLICY
from api.services import Services

SWAGGER_UI = files("flask_swagger_ui") / "dist"
"""The package is taken for these files; its own page would run a script that stands in it."""

PAGES = Path(__file__).parent / "pages"

ASSETS = {
    "docs.js": (PAGES, "text/javascript"),
    "swagger-ui-bundle.js": (SWAGGER_UI, "text/javascript"),
    "swagger-ui.css": (SWAGGER_UI, "text/css"),
    "favicon-32x32.png": (SWAGGER_UI, "image/png"),
}
"""What the page loads: where it is and what it is."""

POLICY = {
    # The icons in Swagger UI's stylesheet are data: URLs. An image runs nothing.
    CONTENT_SECURITY_POLICY: "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}


def docs_routes(services: Services) -> Blueprint:
    """The endpoints for whoever wants to know the API."""
    routes = Blueprint("docs", __name__)
    description = msgspec.json.encode(document(services.settings))

    @routes.get("/openapi.json")
    def openapi() -> Response:
        return Response(description, content_type="application/json")

    @routes.get("/docs")
    def page() -> Response:
        return Response((PAGES / "docs.html").read_bytes(), headers=POLICY, mimetype="text/html")

    @routes.get(f"/docs/<any({', '.join(map(repr, ASSETS))}):name>")
    def asset(name: str) -> Response:
        folder, kind = ASSETS[name]
        return Response((folder / name).read_bytes(), mimetype=kind, headers={"Cache-Control": "max-age=3600"})

    return routes
