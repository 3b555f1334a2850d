using System;
using System.IO;
using System.Net.Http;
using System.Text;
using UnityEngine;

// A walker is somewhere on a line and must go to a goal. Replace the walk by your game. It makes its own object when you
// press Play, so the scene may be empty.
public class Walk : MonoBehaviour
{
    const string Url = "http://127.0.0.1:8000";
    const int TicksPerFrame = 100;  // to learn fast; with 1 you can watch
    static readonly string Contract = @"{'contract': 1, 'encoding': 'packed',
        'observations': {'walk': {'shape': [2], 'labels': ['place', 'goal']}},
        'actions': {'move': {'kind': 'discrete', 'size': 2, 'labels': ['left', 'right']}}}".Replace('\'', '"');

    readonly HttpClient http = new HttpClient { Timeout = TimeSpan.FromMinutes(5) };
    readonly System.Random random = new System.Random();
    string session;
    float place, goal, reward;
    int ticks, games;
    double total;

    [RuntimeInitializeOnLoadMethod]
    static void Begin()
    {
        Application.runInBackground = true;
        new GameObject("Walk").AddComponent<Walk>();
    }

    void Update()
    {
        try
        {
            for (int tick = 0; tick < TicksPerFrame; tick++) Play();
        }
        catch (Exception error)
        {
            Debug.LogError(error.GetBaseException().Message);  // brayx says what is wrong, or nothing listens at Url
            enabled = false;
        }
        transform.position = new Vector3(place, 0, 0);
    }

    void Play()
    {
        if (session == null)
        {
            session = Guid.NewGuid().ToString();
            place = Somewhere();
            goal = Somewhere();
            reward = 0;
            ticks = 0;
            // Answered when the training's model acts: the editor waits for it.
            Step("start", Encoding.UTF8.GetBytes(Contract));
        }
        var reply = Step("tick", Body(0));
        place += BitConverter.ToInt32(reply, 0) == 1 ? 0.1f : -0.1f;
        reward = Math.Abs(place - goal) < 0.1f ? 1 : -0.02f;
        total += reward;
        if (reward < 1 && ++ticks < 40) return;
        Step("stop", Body(reward == 1 ? 2 : 4));  // 2: terminated, 4: truncated
        session = null;
        if (++games % 100 != 0) return;
        Debug.Log(games + " games, mean reward " + (total / 100).ToString("F2"));
        total = 0;
    }

    float Somewhere()
    {
        return (float)random.NextDouble() * 2 - 1;
    }

    // The body of a tick or a stop: the reward since the last tick, how the game ended, the observation. Little-endian.
    byte[] Body(int flags)
    {
        var stream = new MemoryStream();
        var writer = new BinaryWriter(stream);
        writer.Write(reward);
        writer.Write((byte)flags);
        writer.Write(place);
        writer.Write(goal);
        return stream.ToArray();
    }

    byte[] Step(string kind, byte[] body)
    {
        var request = new HttpRequestMessage(HttpMethod.Post, Url + "/step") { Content = new ByteArrayContent(body) };
        request.Headers.Add("session", session);
        request.Headers.Add("step-kind", kind);
        var response = http.SendAsync(request).Result;
        var reply = response.Content.ReadAsByteArrayAsync().Result;
        if (!response.IsSuccessStatusCode) throw new Exception(Encoding.UTF8.GetString(reply));
        return reply;
    }

    void OnDestroy()
    {
        http.Dispose();
    }
}
