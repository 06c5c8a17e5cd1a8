"""The middleware and the addresses of that site, with one page that breaks its policy."""

from django.contrib.auth.models import User
from django.http import HttpResponse
from django.urls import include, path


def strict_and_logged_in(get_response):
    def answer(request):
        request.user = User.objects.get(username="admin")
        response = get_response(request)
        policy = "default-src 'self'; img-src 'self' data:"
        # Scripts of Django's own admin break this rule, so it is not on each page.
        trusted = "; require-trusted-types-for 'script'" if "trusted" in request.GET else ""
        response["Content-Security-Policy"] = policy + trusted
        return response

    return answer


def inline(request):
    return HttpResponse("<p style='color: red'>inline</p><script>document.title = 'inline'</script>")


urlpatterns = [path("inline/", inline), path("", include("example_project.urls"))]
