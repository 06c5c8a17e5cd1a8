"""Settings of the example project, read from the environment by django-environ."""

from __future__ import annotations

from pathlib import Path

import environ

env = environ.Env()

BASE_DIR = Path(__file__).resolve().parent

# The demo and the tests run on this machine only. Set another key to deploy the shop.
SECRET_KEY = env.str("SECRET_KEY", default="only-for-the-demo-and-the-tests")
DEBUG = env.bool("DEBUG", default=False)
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["127.0.0.1", "localhost", "[::1]", "testserver"])

DATABASES = {"default": env.db("DATABASE_URL", default="postgres:///django_pglock")}
DATABASES["default"]["CONN_MAX_AGE"] = env.int("CONN_MAX_AGE", default=60)
DATABASES["default"]["CONN_HEALTH_CHECKS"] = True
# The server checks every two seconds whether a client that waits for a lock is still connected.
DATABASES["default"].setdefault("OPTIONS", {})["options"] = "-c client_connection_check_interval=2s"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_pglock",
    "example_project.shop",
    "example_project.systems",
    "example_project.systems.mutex",
    "example_project.systems.checkout",
    "example_project.systems.handoff",
    "example_project.systems.ledger",
    "example_project.systems.sharing",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

TASKS = {
    "default": {
        "BACKEND": "django_pglock.backend.PostgresBackend",
        "QUEUES": ["default", "mail", "ledger"],
        "OPTIONS": {"database": "default"},
    }
}
DJANGO_PGLOCK = {
    "HEARTBEAT_INTERVAL": env.float("HEARTBEAT_INTERVAL", default=3.0),
}

# How long the shop's bank takes to answer.
SHOP_PAYMENT_SECONDS = env.float("SHOP_PAYMENT_SECONDS", default=0.02)

# The payment provider of the systems "checkout" and "ledger".
PAYMENTS_URL = env.str("PAYMENTS_URL", default="http://127.0.0.1:8900")

ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"
LOGIN_URL = "admin:login"
USE_TZ = True
TIME_ZONE = "UTC"
PASSWORD_HASHERS = env.list("PASSWORD_HASHERS", default=["django.contrib.auth.hashers.PBKDF2PasswordHasher"])
