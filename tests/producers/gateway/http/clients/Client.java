import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.net.http.WebSocket;
import java.util.List;
import java.util.concurrent.TimeUnit;

/** Sends the JDK's own requests: java Client.java http://127.0.0.1:8000 MODEL. Prints each answer's status. Its WebSocket's handshake
 * has the length 0. */
public class Client {
    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        byte[] body = ("{\"model\": \"" + arguments[1] + "\", \"prompt\": \"def f\"}").getBytes();
        HttpClient client = HttpClient.newHttpClient(); // prefers HTTP/2, so each request offers h2c
        HttpRequest.Builder tasks = HttpRequest.newBuilder(URI.create(url + "/v1/tasks"));
        tasks.header("Content-Type", "application/json");
        List<HttpRequest.BodyPublisher> bodies = List.of(
            BodyPublishers.ofByteArray(body), // with Content-Length
            BodyPublishers.fromPublisher(BodyPublishers.ofByteArray(body)), // chunked
            BodyPublishers.ofByteArray(body));
        String last = null;
        for (HttpRequest.BodyPublisher publisher : bodies) {
            var answer = client.send(tasks.copy().POST(publisher).build(), BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version());
            last = answer.headers().firstValue("location").orElse("");
        }
        var seen = client.send(HttpRequest.newBuilder(URI.create(url + last)).build(), BodyHandlers.ofString());
        System.out.println(seen.statusCode() + " " + seen.version());
        URI events = URI.create(url.replace("http", "ws") + last + "/events");
        client.newWebSocketBuilder().buildAsync(events, new WebSocket.Listener() {}).get(60, TimeUnit.SECONDS).abort();
        System.out.println("101");
    }
}
