"""GET /v1/models and /v1/models/<id>: what live workers serve."""

from flask import Blueprint, Response

from api.errors import SHOWN_PATH
from api.routes.json import json_response
from api.schemas.models import ModelList, models
from api.services import Services
from shared.errors import ErrorCode, RequestError


def model_routes(services: Services) -> Blueprint:
    """The endpoints that tell of models."""
    routes = Blueprint("models", __name__)

    @routes.get("/v1/models")
    def list_models() -> Response:
        return json_response(ModelList(data=models(services.fleet.workers())))

    @routes.get("/v1/models/<path:name>")
    def retrieve_model(name: str) -> Response:
        for model in models(services.fleet.workers()) + models(services.fleet.workers(fresh=True)):
            if model.id == name:
                return json_response(model)
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, f"The model '{name[:SHOWN_PATH]}' does not exist.", param="model")

    return routes
