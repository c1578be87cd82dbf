# What the trainer and its tests have in common, compiled once for both.
if(NOT TARGET train_moe_parts)
  set(trainer ${CMAKE_CURRENT_LIST_DIR}/train_moe)
  add_library(train_moe_parts OBJECT ${trainer}/options.cpp ${trainer}/option_rules.cpp ${trainer}/data.cpp
                                     ${trainer}/check.cpp ${CMAKE_CURRENT_LIST_DIR}/validate/log.cpp)
  target_link_libraries(train_moe_parts PUBLIC pleat::pleat PRIVATE pleat_warnings)
  target_include_directories(train_moe_parts PUBLIC ${trainer} ${CMAKE_CURRENT_LIST_DIR})
  target_compile_definitions(train_moe_parts PRIVATE PLEAT_DEFAULT_TEXT="${PROJECT_SOURCE_DIR}/LICENSE"
                                                     $<$<BOOL:${PLEAT_TRAIN_MOE_DEMO}>:PLEAT_TRAIN_MOE_DEMO>)
endif()
