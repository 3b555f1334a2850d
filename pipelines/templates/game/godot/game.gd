# A walker is somewhere on a line and must go to a goal. Replace the walk by your game.
# `godot --headless --games=1000` plays without a window, and so many games.
extends Node2D

const HOST := "127.0.0.1"
const PORT := 8101
const TICKS_PER_FRAME := 100  # to learn fast; with 1 you can watch
const CONTRACT := """{"contract": 1, "encoding": "packed",
	"observations": {"walk": {"shape": [2], "labels": ["place", "goal"]}},
	"actions": {"move": {"kind": "discrete", "size": 2, "labels": ["left", "right"]}}}"""

var door := StreamPeerTCP.new()
var session := ""
var place := 0.0
var goal := 0.0
var reward := 0.0
var ticks := 0
var played := 0
var games := 0  # 0: plays on
var total := 0.0


func _ready() -> void:
	randomize()
	for argument in OS.get_cmdline_args():
		if argument.begins_with("--games="):
			games = int(argument.trim_prefix("--games="))
	door.connect_to_host(HOST, PORT)
	while door.get_status() == StreamPeerTCP.STATUS_CONNECTING:
		door.poll()
	if door.get_status() == StreamPeerTCP.STATUS_CONNECTED:
		start()
	else:
		fail("nothing listens at %s:%d: start `brayx train` first" % [HOST, PORT])


func _process(_delta: float) -> void:
	for _tick in range(TICKS_PER_FRAME):
		if session == "":
			return
		play()
	queue_redraw()


func _draw() -> void:
	draw_line(Vector2(100, 300), Vector2(900, 300), Color(0.5, 0.5, 0.5))
	draw_circle(Vector2(500 + 400 * goal, 300), 30, Color(0.2, 0.8, 0.2))
	draw_circle(Vector2(500 + 400 * place, 300), 15, Color(1, 1, 1))


func start() -> void:
	session = "walk-%d-%d" % [randi(), randi()]
	place = randf() * 2 - 1
	goal = randf() * 2 - 1
	reward = 0.0
	ticks = 0
	step("start", CONTRACT.to_utf8_buffer())  # answered when the training's model acts: the window waits for it


func play() -> void:
	var reply = step("tick", body(0))
	if session == "":
		return
	place += 0.1 if reply.get_32() == 1 else -0.1
	reward = 1.0 if abs(place - goal) < 0.1 else -0.02
	total += reward
	ticks += 1
	if reward < 1 and ticks < 40:
		return
	step("stop", body(2 if reward == 1 else 4))  # 2: terminated, 4: truncated
	played += 1
	if played % 100 == 0 or played == games:
		print("%d games, mean reward %.2f" % [played, total / ((played - 1) % 100 + 1)])
		total = 0.0
	if played == games:
		session = ""
		get_tree().quit()
	elif session != "":
		start()


# The body of a tick or a stop: the reward since the last tick, how the game ended, the observation.
func body(flags: int) -> PackedByteArray:
	var data := StreamPeerBuffer.new()
	data.put_float(reward)
	data.put_u8(flags)
	data.put_float(place)
	data.put_float(goal)
	return data.data_array


# One request over brayx's TCP door (docs/protocol.md, "TCP") and its reply.
func step(kind: String, request_body: PackedByteArray) -> StreamPeerBuffer:
	var name_bytes := session.to_utf8_buffer()
	var request := StreamPeerBuffer.new()
	request.big_endian = true
	for size in [name_bytes.size(), kind.length(), 0, 0, request_body.size(), 1]:
		request.put_64(size)
	request.put_data(name_bytes)
	request.put_data(kind.to_utf8_buffer())
	request.put_data(request_body)
	door.put_data(request.data_array)
	var head := received(24)
	if session == "":
		return head
	head.big_endian = true
	var name_size := head.get_64()
	var body_size := head.get_64()
	var time := head.get_64()
	received(name_size)
	var reply := received(body_size)
	if time < 0:
		fail(reply.data_array.get_string_from_utf8())
	return reply


func received(size: int) -> StreamPeerBuffer:
	var reply := StreamPeerBuffer.new()
	if size > 0:
		var read := door.get_data(size)
		if read[0] != OK:
			fail("the connection to brayx ended")
		reply.data_array = read[1]
	return reply


func fail(message: String) -> void:
	push_error(message)
	session = ""
	get_tree().quit(1)
