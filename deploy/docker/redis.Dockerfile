# Redis with users, as Debian ships it.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends redis-server \
    && rm -rf /var/lib/apt/lists/* /etc/redis
RUN for folder in /data /secrets/api /secrets/worker /secrets/operator; do \
        mkdir -p $folder && chown 10001:10001 $folder && chmod 700 $folder; \
    done
COPY deploy/docker/redis/redis.conf deploy/redis/users.acl /usr/local/etc/redis/
COPY deploy/docker/redis/start deploy/docker/redis/redis-operator /usr/local/bin/
USER 10001:10001
VOLUME /data
EXPOSE 6379
# `probe` needs no password and may only ping; while Redis loads its file the answer is an error.
HEALTHCHECK --interval=2s --timeout=5s --start-period=60s --retries=5 \
    CMD redis-cli --user probe --pass none --no-auth-warning ping | grep -q PONG
CMD ["start"]
