// The make of device it is: CUDA, in the place that torch keeps for it, or PrivateUse1, torch's place for a make it does not know.
#pragma once
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>

namespace sim {
using c10::DeviceType;
constexpr DeviceType DEVICE = DeviceType::SIMULATED_MAKE;  // the build says which
constexpr c10::DispatchKey KEY = c10::DispatchKey::SIMULATED_MAKE;
}  // namespace sim
