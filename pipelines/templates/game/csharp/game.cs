using System;
using System.Linq;
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
        var content = new ByteArrayContent(body) { Headers = { { "session", session }, { "step-kind", kind } } };
        var response = Http.PostAsync(url + "/step", content).Result;
        var reply = response.Content.ReadAsByteArrayAsync().Result;
        return response.IsSuccessStatusCode ? reply : throw new Exception(Encoding.UTF8.GetString(reply));
    }

    static byte[] Body(float reward, byte flags, params float[] walk) =>  // little-endian, as .NET's machines are
        BitConverter.GetBytes(reward).Append(flags).Concat(walk.SelectMany(BitConverter.GetBytes)).ToArray();

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
                place += BitConverter.ToSingle(Step(args[0], session, "tick", Body(reward, 0, place, goal)), 0);
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
