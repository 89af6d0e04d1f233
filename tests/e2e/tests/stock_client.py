"""Drives a daemon over its socket with nothing but stock grpcio and what reflection tells."""

import sys

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

channel = grpc.insecure_channel(
    "unix:" + sys.argv[1], options=[("grpc.default_authority", "localhost")]
)
grpc.channel_ready_future(channel).result(timeout=10)

health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
print("health", health_pb2.HealthCheckResponse.ServingStatus.Name(health.status))


def reflect(version, request):
    """One question to the reflection service; v1 and v1alpha have the same messages."""
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return next(iter(call(iter([request]), timeout=10)))


pool = descriptor_pool.DescriptorPool()
known = set()


def add(version, files):
    """Adds files to the pool, what they import first."""
    for data in files:
        proto = descriptor_pb2.FileDescriptorProto.FromString(data)
        if proto.name in known:
            continue
        known.add(proto.name)
        for name in proto.dependency:
            if name not in known:
                request = reflection_pb2.ServerReflectionRequest(file_by_filename=name)
                answer = reflect(version, request)
                add(version, answer.file_descriptor_response.file_descriptor_proto)
        pool.Add(proto)


for version in ("v1alpha", "v1"):
    listed = reflect(version, reflection_pb2.ServerReflectionRequest(list_services=""))
    names = sorted(service.name for service in listed.list_services_response.service)
    print(version, *[name for name in names if name.startswith("cofferdam.")])
    request = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="cofferdam.v1.ProcessService"
    )
    found = reflect(version, request)
    add(version, found.file_descriptor_response.file_descriptor_proto)


def message(name):
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("cofferdam.v1." + name))


def unary(method, request, response):
    call = channel.unary_unary(
        "/cofferdam.v1." + method,
        request_serializer=lambda value: value.SerializeToString(),
        response_deserializer=message(response).FromString,
    )
    return call(request, timeout=20)


request = message("ExecuteRequest")(
    session="python", request_id="python-1", stdin=b"from python\n"
)
request.process.command.extend(["/bin/bash", "--noprofile", "--norc", "-c", "cat; exit 7"])
answer = unary("ProcessService/Execute", request, "ExecuteResponse")
print("execute", answer.exit.exited.code, answer.stdout)

request = message("StartRequest")(session="python", request_id="python-2")
request.process.command.extend(["/bin/echo", "streamed"])
start = channel.unary_stream(
    "/cofferdam.v1.ProcessService/Start",
    request_serializer=lambda value: value.SerializeToString(),
    response_deserializer=message("ProcessEvent").FromString,
)
print("stream", *[event.WhichOneof("event") for event in start(request, timeout=20)])

try:
    unary("ProcessService/Execute", message("ExecuteRequest")(), "ExecuteResponse")
    print("not refused")
except grpc.RpcError as error:
    print("refused", error.code().name)
