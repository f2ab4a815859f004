"""A user for each process, whose policy moto enforces."""

from __future__ import annotations

import json
from typing import Any, Final

from producers.aws.policies import OF_GROUPS, OF_SERVICES, Scope, policy
from tests.aws import Aws

#: moto's own names of actions -> AWS's, where they differ.
MOTOS: Final = {
    "s3:HeadBucket": "s3:ListBucket",
    "sqs:SendMessageBatch": "sqs:SendMessage",
    "sqs:DeleteMessageBatch": "sqs:DeleteMessage",
    "sqs:ChangeMessageVisibilityBatch": "sqs:ChangeMessageVisibility",
}
#: moto knows no resource of a call that names its queue otherwise than by URL, nor those of these services.
BY_NAME: Final = {"sqs:GetQueueUrl", "sqs:CreateQueue", *OF_SERVICES, *OF_GROUPS}


def user(aws: Aws, role: str, scope: Scope) -> dict[str, str]:
    """What boto3 reads from the environment, for a new user with the policy of a process."""
    iam = aws.client("iam")
    iam.create_user(UserName=role)
    iam.put_user_policy(UserName=role, PolicyName=role, PolicyDocument=as_moto_reads_it(policy(role, scope)))
    key = iam.create_access_key(UserName=role)["AccessKey"]
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


def as_moto_reads_it(document: dict[str, Any]) -> str:
    statements = []
    for statement in document["Statement"]:
        actions = [*statement["Action"], *(name for name, of in MOTOS.items() if of in statement["Action"])]
        statements.append(statement | {"Action": actions})
        if by_name := BY_NAME & set(actions):
            statements.append({"Effect": "Allow", "Action": sorted(by_name), "Resource": "*"})
    return json.dumps(document | {"Statement": statements})
