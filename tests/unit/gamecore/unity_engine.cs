// What the Unity project of `brayx new --template unity` uses of its engine, to play it under Mono: the class behind
// RuntimeInitializeOnLoadMethod makes a component, whose Update is called until as many games have ended as are wanted.
using System;
using System.Reflection;

namespace UnityEngine
{
    public class RuntimeInitializeOnLoadMethodAttribute : Attribute { }
    public struct Vector3 { public Vector3(float x, float y, float z) { } }
    public class Transform { public Vector3 position; }
    public class MonoBehaviour { public bool enabled = true; public Transform transform = new Transform(); }
    public static class Application { public static bool runInBackground; }

    public class GameObject
    {
        public static MonoBehaviour Component;
        public GameObject(string name) { }
        public T AddComponent<T>() where T : MonoBehaviour, new()
        {
            var component = new T();
            Component = component;
            return component;
        }
    }

    public static class Debug
    {
        public static int Lines;
        public static void Log(object said) { Console.WriteLine(said); Lines++; }
        public static void LogError(object said) { Console.Error.WriteLine(said); Environment.Exit(1); }
    }

    static class Engine
    {
        const BindingFlags Any = BindingFlags.Static | BindingFlags.Instance | BindingFlags.NonPublic | BindingFlags.Public;

        static void Main(string[] args)
        {
            foreach (var type in Assembly.GetExecutingAssembly().GetTypes())
                foreach (var method in type.GetMethods(Any))
                    if (method.GetCustomAttribute<RuntimeInitializeOnLoadMethodAttribute>() != null) method.Invoke(null, null);
            var update = GameObject.Component.GetType().GetMethod("Update", Any);
            while (Debug.Lines == 0) update.Invoke(GameObject.Component, null);
        }
    }
}
