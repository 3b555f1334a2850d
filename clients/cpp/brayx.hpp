// brayx's client for C++17: header-only, no dependency but POSIX sockets.
//
//     brayx::Client client("tcp://127.0.0.1:8101");
//     client.start();
//     std::string action = client.tick(observation);   // bytes in, bytes out; the agent decodes them
//     client.stop();
//
// `brayx::Client` blocks; `brayx::AsyncClient` calls back from its `poll()`. See README.md in this folder.
#pragma once

#include "brayx/async_client.hpp"
#include "brayx/client.hpp"
#include "brayx/contract.hpp"
#include "brayx/error.hpp"
#include "brayx/json.hpp"
