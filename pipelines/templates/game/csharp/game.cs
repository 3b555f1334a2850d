using System;
using System.IO;
using System.Net.Http;
using System.Text;

static class Game
{
    static readonly string Contract = @"{'contract': 1, 'encoding': 'packed',
        'observations': {'walk': {'shape': [2], 'labels': ['place', 'goal']}},
        'actions': {'speed': {'kind': 'continuous', 'size': 1, 'low': -0.2, 'high': 0.2}}}".Replace('\'', '"');
    static readonly HttpClient Http = new HttpClient();

    static byte[] Step(string url, string session, string kind, byte[] body)
    {
        var request = new HttpRequestMessage(HttpMethod.Post, url + "/step") { Content = new ByteArrayContent(body) };
        request.Headers.Add("session", session);
        request.Headers.Add("step-kind", kind);
        var response = Http.SendAsync(request).Result;
        var reply = response.Content.ReadAsByteArrayAsync().Result;
        if (!response.IsSuccessStatusCode) throw new Exception(Encoding.UTF8.GetString(reply));
        return reply;
    }

    static byte[] Body(float reward, byte flags, float place, float goal)
    {
        var stream = new MemoryStream();
        var writer = new BinaryWriter(stream);  // little-endian on every machine
        writer.Write(reward); writer.Write(flags); writer.Write(place); writer.Write(goal);
        return stream.ToArray();
    }

    static void Main(string[] args)
    {
        var random = new Random();
        double sum = 0;
        int games = args.Length > 1 ? int.Parse(args[1]) : 1000;
        for (int game = 1; game <= games; game++)
        {
            var session = Guid.NewGuid().ToString();
            Step(args[0], session, "start", Encoding.UTF8.GetBytes(Contract));
            float place = (float)random.NextDouble() * 2 - 1, goal = (float)random.NextDouble() * 2 - 1, reward = 0;
            for (int ticks = 0; reward < 1 && ticks < 40; ticks++)
            {
                var reply = Step(args[0], session, "tick", Body(reward, 0, place, goal));
                place += new BinaryReader(new MemoryStream(reply)).ReadSingle();
                reward = Math.Abs(place - goal) < 0.1f ? 1 : -0.02f;
                sum += reward;
            }
            Step(args[0], session, "stop", Body(reward, (byte)(reward == 1 ? 2 : 4), place, goal)); // 2: terminated
            if (game % 100 != 0 && game != games) continue;
            Console.WriteLine("{0} games, mean reward {1:F2}", game, sum / ((game - 1) % 100 + 1));
            sum = 0;
        }
    }
}
