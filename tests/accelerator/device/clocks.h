// Vector clocks: what has happened before what, whatever the delays were.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace sim {

// Places in a clock: those of the host's threads and of the streams, in turn.
inline int place_of_thread(int number) { return 2 * number; }
inline int place_of_stream(int number) { return 2 * number + 1; }
inline bool is_stream(int place) { return place % 2; }
inline int number_of(int place) { return place / 2; }

using Clock = std::vector<uint32_t>;

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

inline uint32_t time_of(const Clock& clock, int place) { return (size_t)place < clock.size() ? clock[place] : 0; }

inline void tick(Clock& clock, int place) {
  if ((int)clock.size() <= place) clock.resize(place + 1);
  ++clock[place];
}

}  // namespace sim
